"""A DeepSeek-shaped base model that reads English and finds facts again over 16 thousand tokens, on two CPU cores.

    python -m train latent_base

TODO
"""

from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig
from train.config import CheckpointConfig, OptimizerConfig, TrainConfig
from train.data import DataConfig

config = TrainConfig(
    model=ModelConfig(
        vocab_size=1024,
        num_layers=5,
        hidden_size=256,
        mlp_size=768,
        max_length=32_768,
        attention=AttentionConfig(
            num_heads=4,
            q_lora_rank=0,
            kv_lora_rank=128,
            qk_nope_head_dim=48,
            qk_rope_head_dim=16,
            v_head_dim=48,
        ),
        moe=MoEConfig(
            num_experts=16,
            num_shared_experts=1,
            top_k=2,
            expert_size=160,
            first_dense=1,
            score="sigmoid",
            bias_step=2e-3,
            sequence_loss=1e-4,
        ),
    ),
    data=DataConfig(
        corpus="english",
        held_out_fraction=0.1,
        sequence_length=2048,
        batch_size=1,
        align=128,
        needle_share=0.7,
        position_span=20_480,
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="wsd", warmup_steps=100, decay_fraction=0.0),
    checkpoint=CheckpointConfig(directory="runs/latent_base", interval=100),
    steps=1500,
    eval_interval=250,
    eval_batches=16,
)
