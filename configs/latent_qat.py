"""Training with the mixed cache's rounding: the model of needle_512 goes on, 2048 tokens at a time.

    python -m train latent_qat          # after the base, see `latent_control`

The same steps over the same tokens as `latent_control`, but in the second half each query reads its own view of the
mixed cache: 8 bits near it and for the first tokens, 4 bits beyond. `python -m infer evaluate` tells what
that is worth.

Expect: some 20 minutes on two cores; held-out perplexity 14.5.
"""

import dataclasses

from configs import latent_control
from mlaflax.config import MixedConfig

config = dataclasses.replace(
    latent_control.config,
    model=dataclasses.replace(latent_control.config.model, cache_format="mixed", mixed=MixedConfig()),
    checkpoint=dataclasses.replace(latent_control.config.checkpoint, directory="runs/latent_qat"),
    quantize_from=300,
)
