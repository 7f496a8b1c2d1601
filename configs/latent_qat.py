"""Training with the mixed cache's rounding: demo_hour goes on at a context of 2048 tokens, quantisation-aware.

    python -m train demo_hour
    python -m train latent_qat

The same steps over the same tokens as `latent_control`, but each query reads its own view of the mixed cache: 8 bits
near it and for sinks and salient tokens, 4 bits beyond. `python -m infer evaluate` tells what that is worth.
Expect: a little longer than `latent_control`, about the same losses; with `--steps 200` held-out perplexity 14.0.
"""

import dataclasses

from configs import latent_control
from mlaflax.config import MixedConfig

config = dataclasses.replace(
    latent_control.config,
    model=dataclasses.replace(latent_control.config.model, cache_format="mixed", mixed=MixedConfig()),
    checkpoint=dataclasses.replace(latent_control.config.checkpoint, directory="runs/latent_qat"),
)
