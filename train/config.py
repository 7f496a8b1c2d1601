"""Everything that a training run can be told, as validated frozen dataclasses."""

import dataclasses
import math
from typing import Literal

from mlaflax.config import ModelConfig, require, require_choice, require_positive, require_types
from train.data import DataConfig

Schedule = Literal["cosine", "wsd"]
Target = Literal["none", "bigram", "trigram"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) with a warm-up, a schedule and clipping by the global norm.

    Attributes:
      learning_rate: the peak, reached after the warm-up.
      beta1: decay of the running mean of gradients.
      beta2: decay of the running mean of their squares.
      epsilon: added to the root of the latter.
      weight_decay: of matrices; norm weights are not decayed.
      schedule: "cosine" falls from the warm-up to the end; "wsd" holds the peak and falls
        linearly over the last `decay_fraction` of the steps.
      warmup_steps: steps in which the learning rate rises linearly from 0.
      decay_fraction: the part of all steps in which "wsd" falls.
      final_ratio: the last learning rate, as a part of the peak.
      clip_norm: largest global norm of the gradient; 0 does not clip.
      accumulation: parts into which each batch is split, one after the other, to save memory.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    schedule: Schedule = "cosine"
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    final_ratio: float = 0.1
    clip_norm: float = 1.0
    accumulation: int = 1

    def __post_init__(self):
        p = "optimizer."
        require_types(self, p)
        require_positive(self, p, "learning_rate", "epsilon", "accumulation")
        require_choice(p + "schedule", self.schedule, Schedule)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, p + name, value, "must be at least 0 and below 1")
        for name in ("weight_decay", "warmup_steps", "clip_norm"):
            value = getattr(self, name)
            require(value >= 0, p + name, value, "must be 0 or more")
        for name in ("decay_fraction", "final_ratio"):
            value = getattr(self, name)
            require(0 <= value <= 1, p + name, value, "must lie between 0 and 1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Where the run lives, and how often it is saved.

    Attributes:
      directory: of the run: checkpoints, metrics, plots. A run that is there already is resumed.
      interval: steps between checkpoints; the last step is always saved.
      keep: checkpoints to keep, the newest ones.
      initial: directory of a run whose newest weights this one begins with; the optimiser starts afresh.
      rotate_latents: rotate the latents of these weights first, which changes nothing but what is stored and so
        what rounding loses (`mlaflax.model.rotation`).
    """

    directory: str = "runs/unnamed"
    interval: int = 100
    keep: int = 2
    initial: str | None = None
    rotate_latents: bool = False

    def __post_init__(self):
        require_types(self, "checkpoint.")
        require(bool(self.directory), "checkpoint.directory", self.directory, "must name a directory")
        require(self.initial != "", "checkpoint.initial", self.initial, "must name a directory, or be none")
        require_positive(self, "checkpoint.", "interval", "keep")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; the product is the number of devices, and one axis may be -1: the rest.

    Attributes:
      data: batch; weights replicated.
      fsdp: batch; weights sharded.
      expert: batch; experts sharded.
      tensor: heads and hidden widths.
      context: positions of a sequence.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        require_types(self, "mesh.")
        for name, size in self.sizes().items():
            require(
                size > 0 or size == -1, f"mesh.{name}", size, "must be at least 1, or -1 for the devices left"
            )

    def sizes(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @property
    def single(self) -> bool:
        """Whether one device is enough."""
        return math.prod(self.sizes().values()) == 1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
      model: the model; its `vocab_size` must hold the tokenizer's entries.
      steps: optimiser steps, each on one batch.
      seed: of the first weights.
      eval_interval: steps between evaluations on held-out documents; 0 only at the end.
      eval_batches: batches in an evaluation; 0 takes all held-out text.
      log_interval: steps between lines in metrics.jsonl and points in TensorBoard.
      max_nonfinite_steps: steps in a row whose loss or gradient may be NaN or infinite, and which are
        left out, before training stops.
      loss_chunk: positions times vocabulary entries whose logits exist at a time; bounds memory.
      target: an n-gram model of the training text ("bigram" interpolated, "trigram" Kneser-Ney)
        to beat on held-out text: training stops when it does, and fails when it never does.
      quantize_from: steps after which the training graph rounds latents as `model.cache_format` says; until then
        it reads them as they are.
      tensorboard: write TensorBoard files.
      profile: write a jax.profiler trace of a few steps.
      compilation_cache: keep compiled programs in ~/.cache/mlaflax for the next start.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    steps: int = 1000
    seed: int = 0
    eval_interval: int = 100
    eval_batches: int = 0
    log_interval: int = 1
    max_nonfinite_steps: int = 10
    loss_chunk: int = 1 << 24
    target: Target = "none"
    quantize_from: int = 0
    tensorboard: bool = True
    profile: bool = False
    compilation_cache: bool = True

    def __post_init__(self):
        require_types(self)
        require_positive(self, "", "steps", "log_interval", "max_nonfinite_steps", "loss_chunk")
        require_choice("target", self.target, Target)
        for name in ("seed", "eval_interval", "eval_batches", "quantize_from"):
            value = getattr(self, name)
            require(value >= 0, name, value, "must be 0 or more")
        length, longest = self.data.sequence_length, self.model.max_length
        require(
            length <= longest, "data.sequence_length", length, f"must not exceed model.max_length ({longest})"
        )
        span = self.data.position_span
        require(span <= longest, "data.position_span", span, f"must not exceed model.max_length ({longest})")
        if self.model.cache_format == "mixed":
            page, align = self.model.mixed.page, self.data.align
            if align == 1:
                # So that `--model.cache-format mixed` alone is enough.
                object.__setattr__(self, "data", dataclasses.replace(self.data, align=page))
            else:
                require(
                    align % page == 0,
                    "data.align",
                    align,
                    f"must be a multiple of model.mixed.page ({page}), as the cache's pages begin where documents do",
                )
        rows, parts = self.data.batch_size, self.optimizer.accumulation
        require(rows % parts == 0, "optimizer.accumulation", parts, f"must divide data.batch_size ({rows})")
        warmup = self.optimizer.warmup_steps
        require(
            warmup < self.steps,
            "optimizer.warmup_steps",
            warmup,
            f"must be below steps ({self.steps}); lower it, too",
        )
