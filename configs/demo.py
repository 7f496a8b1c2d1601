"""A small DeepSeek-shaped model that learns English in a few minutes on two CPU cores.

    python -m train demo

Expect: to be written.
"""

from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig
from train.config import CheckpointConfig, OptimizerConfig, TrainConfig
from train.data import DataConfig

config = TrainConfig(
    model=ModelConfig(
        vocab_size=4096,
        num_layers=4,
        hidden_size=256,
        mlp_size=768,
        max_length=1024,
        attention=AttentionConfig(
            num_heads=4,
            q_lora_rank=0,
            kv_lora_rank=128,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=64,
        ),
        moe=MoEConfig(
            num_experts=16,
            num_shared_experts=1,
            top_k=2,
            expert_size=192,
            first_dense=1,
            score="sigmoid",
            bias_step=1e-3,
            sequence_loss=1e-4,
        ),
    ),
    data=DataConfig(corpus="english", sequence_length=256, batch_size=16),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30, schedule="wsd", decay_fraction=0.4),
    checkpoint=CheckpointConfig(directory="runs/demo", interval=100),
    steps=400,
    eval_interval=100,
    eval_batches=16,
)
