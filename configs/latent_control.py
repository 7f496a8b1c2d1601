"""The control of the experiments on cache formats: the model of needle_512 goes on, 2048 tokens at a time.

    python -m train demo_hour
    python -m train needle_64
    python -m train needle_128
    python -m train needle_512
    python -m train latent_control

The four before it are the base, under 40 minutes on two cores. Two rows in five have facts to find again, at positions
up to 20 thousand. Takes the same steps over the same tokens as `latent_qat`. What a cache format costs it is the cost
of rounding after training.

Expect: 14 minutes on two cores; held-out perplexity 14.5.
"""

import dataclasses

from configs import needle_512
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    needle_512.config,
    # Documents begin at pages of the mixed cache, so that both branches see the same rows.
    data=dataclasses.replace(
        needle_512.config.data,
        sequence_length=2048,
        batch_size=1,
        needle_share=0.4,
        seed=4,
    ),
    optimizer=OptimizerConfig(
        learning_rate=1.5e-3, schedule="wsd", warmup_steps=20, decay_fraction=1.0, final_ratio=0.02
    ),
    checkpoint=CheckpointConfig(
        directory="runs/latent_control", interval=50, initial="runs/needle_512", rotate_latents=True
    ),
    steps=600,
    eval_interval=200,
)
