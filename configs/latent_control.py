"""The control of the experiments on cache formats: the model of needle_512 goes on with code, 2048 tokens at a time.

    python -m train demo_hour
    python -m train needle_64
    python -m train needle_128
    python -m train needle_512
    python -m train latent_control

The four before it are the base, under 40 minutes on two cores. They teach a model to find things again; code, where
names come back pages later, makes that worth doing. A model that does not look beyond its window cannot tell one
cache from another: in the English of demo_hour's own corpus, none of this size was worse off without it by a percent.

Takes the same steps over the same tokens as `latent_qat`. What a cache format costs it is the cost of rounding after
training. Expect: under 20 minutes on two cores that do nothing else.
"""

import dataclasses

from configs import needle_512
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    needle_512.config,
    # Documents begin at pages of the mixed cache, so that both branches see the same rows.
    data=dataclasses.replace(
        needle_512.config.data,
        corpus="stdlib",
        tokenizer="runs/needle_512/tokenizer.json",
        held_out_fraction=0.08,
        sequence_length=2048,
        batch_size=2,
        needle_share=0.0,
        position_span=0,
        seed=4,
    ),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, schedule="wsd", warmup_steps=20, decay_fraction=1.0, final_ratio=0.02
    ),
    checkpoint=CheckpointConfig(
        directory="runs/latent_control", interval=50, initial="runs/needle_512", rotate_latents=True
    ),
    steps=300,
    eval_interval=150,
)
