"""The third step towards `latent_needle`: eight facts in 512 tokens, whose positions skip over up to 20 thousand.

    python -m train needle_512

Expect: four minutes on two cores. `python -m infer evaluate --suites needle` finds no fact yet.
"""

import dataclasses

from configs import needle_64
from train.config import CheckpointConfig

config = dataclasses.replace(
    needle_64.config,
    data=dataclasses.replace(
        needle_64.config.data,
        sequence_length=512,
        batch_size=2,
        align=128,
        needle_share=0.6,
        needle_facts=8,
        needle_questions=3,
        position_span=20_480,
        seed=2,
    ),
    checkpoint=CheckpointConfig(directory="runs/needle_512", interval=50, initial="runs/needle_128"),
    steps=360,
)
