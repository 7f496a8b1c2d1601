"""Training with the mixed cache's rounding: latent_base goes on for 20 minutes, quantisation-aware.

    python -m train latent_qat

The same steps over the same tokens as `latent_control`, but each query reads its own view of the mixed cache: 8 bits
near it and for sinks and salient tokens, 4 bits beyond. `python -m infer evaluate` tells what that is worth.
"""

import dataclasses

from configs import latent_control
from mlaflax.config import MixedConfig
from train.config import CheckpointConfig

config = dataclasses.replace(
    latent_control.config,
    model=dataclasses.replace(latent_control.config.model, cache_format="mixed", mixed=MixedConfig()),
    checkpoint=CheckpointConfig(directory="runs/latent_qat", interval=100, initial="runs/latent_base"),
)
