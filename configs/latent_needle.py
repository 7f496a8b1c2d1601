"""Training to find facts again at positions up to 20 thousand, in rows of 2048 tokens: for experiments on the cache.

    python -m train latent_needle

Expect: answers to get likelier through all 900 steps; how many facts are found at which length,
`python -m infer evaluate --checkpoint runs/latent_needle --suites needle` tells.
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
