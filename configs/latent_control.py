"""The control of the experiments on cache formats: demo_hour goes on at a context of 2048 tokens, without rounding.

    python -m train demo_hour
    python -m train latent_control

Takes the same steps over the same tokens as `latent_qat`. What a cache format costs it is the cost of rounding after
training. Expect: 20 minutes on two cores that do nothing else; the loss begins at 3.1 and is below 2.7 after 100 steps.
"""

import dataclasses

from configs import demo_hour
from mlaflax.config import RopeConfig
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    demo_hour.config,
    model=dataclasses.replace(
        demo_hour.config.model,
        max_length=65_536,
        # The weights know distances up to 256. Without YaRN the loss beyond them begins at 4.3, with it at 3.1.
        attention=dataclasses.replace(
            demo_hour.config.model.attention, rope=RopeConfig(factor=8.0, original_length=256)
        ),
    ),
    # Documents begin at pages of the mixed cache, so that both branches see the same rows.
    data=dataclasses.replace(demo_hour.config.data, sequence_length=2048, batch_size=2, align=128, seed=1),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, schedule="wsd", warmup_steps=20, decay_fraction=1.0, final_ratio=0.02
    ),
    checkpoint=CheckpointConfig(
        directory="runs/latent_control", interval=50, initial="runs/demo_hour", rotate_latents=True
    ),
    steps=500,
    eval_interval=100,
    eval_batches=16,
    target="none",
)
