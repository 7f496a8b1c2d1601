"""A run small enough to train in seconds, as a configuration and as a file for the command line."""

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys

from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig
from train.config import CheckpointConfig, OptimizerConfig, TrainConfig
from train.data import DataConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "and",
    "then",
    "small",
    "old",
    "red",
]

MODEL = ModelConfig(
    vocab_size=300,
    num_layers=2,
    hidden_size=32,
    mlp_size=48,
    max_length=64,
    attention=AttentionConfig(
        num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
    moe=MoEConfig(num_experts=4, num_shared_experts=1, top_k=2, expert_size=16, first_dense=1),
)


def write_text(path: pathlib.Path, documents: int = 60) -> pathlib.Path:
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(documents):
            words = rng.choices(WORDS, k=rng.randint(20, 120))
            file.write(json.dumps({"text": " ".join(words) + "."}) + "\n")
    return path


def tiny(directory: pathlib.Path, **changes) -> TrainConfig:
    """A tiny run under `directory`, on text written there."""
    text = directory / "text.jsonl"
    if not text.exists():
        write_text(text)
    base = TrainConfig(
        model=MODEL,
        data=DataConfig(
            paths=(str(text),),
            sequence_length=32,
            batch_size=4,
            held_out_fraction=0.1,
            cache_dir=str(directory / "cache"),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        checkpoint=CheckpointConfig(directory=str(directory / "run"), interval=5),
        steps=20,
        eval_interval=10,
        tensorboard=False,
        compilation_cache=False,
    )
    return dataclasses.replace(base, **changes)


def command(directory: pathlib.Path, *flags: str) -> list[str]:
    """The command line of `tiny(directory)` with `flags`."""
    tiny(directory)
    path = directory / "tiny_config.py"
    path.write_text(
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.train.tiny import tiny\n"
        f"config = tiny(pathlib.Path({str(directory)!r}))\n"
    )
    return [sys.executable, "-m", "train", str(path), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(directory: pathlib.Path, *flags: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the training program on `tiny(directory)`."""
    return subprocess.run(
        command(directory, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True, **options
    )


def losses(directory: pathlib.Path) -> dict[int, str]:
    """Loss by step, as hex, from metrics.jsonl: equal only if every bit is."""
    found = {}
    for line in (directory / "run" / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "loss" in values:
            assert values["step"] not in found, "a step was logged twice"
            found[values["step"]] = values["loss"].hex()
    return found
