"""Anonymous memory of this process while it converts a model made for the purpose; run by a test.

python -m tests.convert.measure_memory DIRECTORY
"""

import json
import math
import pathlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mlaflax.checkpoint import model_trees, save_model
from mlaflax.convert.from_hf import open_folder, read_model
from mlaflax.convert.tensors import model_config_from_hf, pieces
from tests.convert.folders import write_folder
from tests.parity import golden

CONFIG = golden.CONFIGS["v3"] | {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
}


def anonymous() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The most anonymous memory within the block, looked at every two milliseconds."""

    def __enter__(self):
        self.bytes, self._stop = anonymous(), False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop:
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.002)

    def __exit__(self, *_):
        self._stop = True
        self._thread.join()


def make(directory: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {p.name: p.shape for list_ in pieces(model_config_from_hf(CONFIG)).values() for p in list_}
    weights = {k: rng.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16) for k, s in shapes.items()}
    write_folder(directory, CONFIG, weights, files=4)


def main(directory: pathlib.Path) -> None:
    make_in = directory / "model"
    if not make_in.exists():  # in a process of its own: what it used would stay here
        import subprocess

        code = f"import pathlib, tests.convert.measure_memory as m; m.make(pathlib.Path({str(make_in)!r}))"
        subprocess.run([sys.executable, "-c", code], check=True)
    jax.block_until_ready(jnp.zeros(3) + 1)
    folder, config = open_folder(make_in)
    before = anonymous()
    with Peak() as reading:
        model = read_model(folder, config)
    leaves = jax.tree.leaves(model_trees(model))
    device = sum(x.nbytes for x in leaves)
    with Peak() as saving:
        save_model(directory / "run", model)
    print(
        json.dumps(
            {
                "largest": max(2 * math.prod(t.shape) for t in folder.tensors.values()),
                "largest_parameter": max(x.nbytes for x in leaves),
                "device": device,
                "reading": reading.bytes - before - device,
                "saving": saving.bytes - before - device,
            }
        )
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
