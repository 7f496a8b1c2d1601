"""Training to find facts again at positions up to 20 thousand, in rows of 2048 tokens: for experiments on the cache.

    python -m train latent_needle

Expect: twenty minutes on two cores, held-out perplexity 14.9. Whether the step from copying the last line to finding
the right one is made depends on what came before: from these configurations it was not (0 of 200 facts found at 2 to 16
thousand tokens), from an earlier series of ten it was (docs/design.md).
"""

import dataclasses

from configs import needle_512
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    needle_512.config,
    data=dataclasses.replace(
        needle_512.config.data, sequence_length=2048, batch_size=1, needle_facts=24, seed=3
    ),
    optimizer=OptimizerConfig(
        learning_rate=1.5e-3, schedule="wsd", warmup_steps=20, decay_fraction=0.3, final_ratio=0.02
    ),
    checkpoint=CheckpointConfig(directory="runs/latent_needle", interval=50, initial="runs/needle_512"),
    steps=900,
    eval_interval=150,
)
