"""The second step towards `latent_needle`: two facts in a row, so that an answer must be found by its key.

    python -m train needle_128

Expect: two minutes on two cores. At the start, half of the words of an answer are right, those of the fact that was
told last; at the end more than nine in ten, and nearly as many with four facts in 256 tokens.
"""

import dataclasses

from configs import needle_64
from train.config import CheckpointConfig

config = dataclasses.replace(
    needle_64.config,
    data=dataclasses.replace(
        needle_64.config.data, sequence_length=128, batch_size=8, needle_facts=2, seed=1
    ),
    checkpoint=CheckpointConfig(directory="runs/needle_128", interval=50, initial="runs/needle_64"),
    steps=270,
)
