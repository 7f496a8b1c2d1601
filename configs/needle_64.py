"""The first of four steps from demo_hour towards a model that finds facts again in long text: to say a line once more.

    python -m train demo_hour
    python -m train needle_64
    python -m train needle_128
    python -m train needle_512
    python -m train latent_needle

Rows of 64 tokens hold one fact and five questions for it. Copying the last line is enough for most answers, and this
is learned within some hundred steps.

Expect: a minute and a half on two cores; the loss falls from 5 to 2. `latent_qat` and `latent_control` begin after the
third step.
"""

import dataclasses

from configs import demo_hour
from train.config import CheckpointConfig, OptimizerConfig

config = dataclasses.replace(
    demo_hour.config,
    model=dataclasses.replace(demo_hour.config.model, max_length=32_768),
    data=dataclasses.replace(
        demo_hour.config.data,
        sequence_length=64,
        batch_size=16,
        needle_share=0.8,
        needle_facts=1,
        needle_questions=5,
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="wsd", warmup_steps=20, decay_fraction=0.0),
    checkpoint=CheckpointConfig(directory="runs/needle_64", interval=50, initial="runs/demo_hour"),
    steps=200,
    eval_interval=0,
    eval_batches=16,
    target="none",
)
