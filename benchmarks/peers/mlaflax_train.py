"""Training worker of mlaflax: the compiled step of `python -m train`, without its loop.

python -m benchmarks.peers.mlaflax_train
"""

import dataclasses
import time

import jax
import numpy as np

from benchmarks.peers import train_data
from benchmarks.peers.protocol import serve
from train.cli import load_config
from train.step import Steps

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class Worker:
    def setup(
        self, threads: int, dtype: str, batch: int, length: int, model: dict, optimizer: dict, config: str
    ):
        del threads, optimizer  # the process is limited to its threads; the optimiser is the configuration's
        loaded = load_config(config)
        chosen = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, dtype=DTYPES[dtype]))
        self.steps = Steps(chosen)
        self.state = self.steps.init()
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
        ones = np.ones((batch, length), np.int32)
        self.batches = [
            self.steps.place(
                {
                    "tokens": x[:, :-1].astype(np.int32),
                    "targets": x[:, 1:].astype(np.int32),
                    "positions": positions,
                    "segment_ids": ones,
                    "loss_mask": ones,
                }
            )
            for x in train_data.batches(model["vocab_size"], batch, length)
        ]
        self.count = 0
        first = self.step(1)
        parameters = sum(x.size for x in jax.tree.leaves(self.state.params))
        return {"parameters": parameters, "loss": first["losses"][0]}

    def step(self, n: int):
        seconds, losses = [], []
        for _ in range(n):
            batch = self.batches[self.count % len(self.batches)]
            self.count += 1
            start = time.perf_counter()
            self.state, metrics = self.steps.train(self.state, batch)
            losses.append(float(metrics["loss"]))
            jax.block_until_ready(self.state)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "losses": losses}

    def release(self):
        self.state = self.batches = self.steps = None
        return {}


if __name__ == "__main__":
    serve(Worker)
