"""A worker for the tests: prints where it should not, and fails, dies or hangs on request."""

import os
import time

from benchmarks.peers.protocol import serve


class Worker:
    def setup(self, threads: int, seconds: float = 0.01, fail: str = ""):
        print("a library that talks to stdout")
        self.seconds, self.fail = seconds, fail
        if fail == "setup":
            raise ValueError("no such shape")
        return {"parameters": 7, "cores": len(os.sched_getaffinity(0)), "threads": threads}

    def step(self, n: int):
        if self.fail == "die":
            os._exit(3)
        if self.fail == "hang":
            time.sleep(60)
        return {"seconds": [self.seconds] * n}

    def release(self):
        return {}


if __name__ == "__main__":
    serve(Worker)
