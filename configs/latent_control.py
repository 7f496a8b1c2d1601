"""The control of the experiments on cache formats: latent_base goes on for 20 minutes without rounding.

    python -m train latent_control

Takes the same steps over the same tokens as `latent_qat`. What a cache format costs it is the cost of rounding
after training.
"""

import dataclasses

from configs import latent_base
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    latent_base.config,
    data=dataclasses.replace(latent_base.config.data, seed=2),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, schedule="wsd", warmup_steps=20, decay_fraction=1.0, final_ratio=0.02
    ),
    checkpoint=CheckpointConfig(directory="runs/latent_control", interval=100, initial="runs/latent_base"),
    steps=800,
)
