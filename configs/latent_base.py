"""The base of the experiments on cache formats: demo_hour goes on at a context of 2048 tokens, for ten minutes.

    python -m train demo_hour
    python -m train latent_base

Begins with the weights of runs/demo_hour and reads the same text in rows of 2048 tokens. The learning rate stays up:
`latent_qat` and `latent_control` go on from here and bring it down, one with the mixed cache's rounding in its
training graph and one without.
"""

import dataclasses

from configs import demo_hour
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    demo_hour.config,
    model=dataclasses.replace(demo_hour.config.model, max_length=65_536),
    # Documents begin at pages of the mixed cache, so that the branches see the same rows.
    data=dataclasses.replace(demo_hour.config.data, sequence_length=2048, batch_size=2, align=128, seed=1),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="wsd", warmup_steps=50, decay_fraction=0.0),
    checkpoint=CheckpointConfig(directory="runs/latent_base", interval=100, initial="runs/demo_hour"),
    steps=480,
    eval_interval=120,
    eval_batches=16,
    target="none",
)
