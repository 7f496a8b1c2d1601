"""What the machine can do: read bandwidth and matrix-product rate, measured between the peers' turns.

    measure() -> {"bytes_per_second": float, "flops_per_second": float}

Each is the best of a few tries of a few ways, in the library's environment: a floor that a lucky program
could beat would be no floor.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.peers.protocol import THREADS_ENV, serve

READ_ELEMENTS = 64 << 20  # float32: 256 MiB, many times any last-level cache
MATRIX = 1024
TRIES = 4


def _best_seconds(function) -> float:
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Worker:
    def __init__(self):
        threads = int(os.environ[THREADS_ENV])
        self.pool = ThreadPoolExecutor(threads)
        self.data = np.ones(READ_ELEMENTS, np.float32)
        self.parts = np.array_split(self.data, threads)
        self.matrix = np.ones((MATRIX, MATRIX), np.float32)

    def measure(self) -> dict:
        def dot():
            np.dot(self.data, self.data)

        def largest():
            list(self.pool.map(np.max, self.parts))

        read = min(_best_seconds(dot), _best_seconds(largest))
        multiply = _best_seconds(lambda: self.matrix @ self.matrix)
        return {
            "bytes_per_second": self.data.nbytes / read,
            "flops_per_second": 2 * MATRIX**3 / multiply,
        }


if __name__ == "__main__":
    serve(Worker)
