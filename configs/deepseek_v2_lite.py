"""DeepSeek-V2-Lite (arXiv:2405.04434): 15.7 B parameters, 2.45 B of them active per token.

The paper says 2.4 B. The embedding, of which a token reads one row, is not counted as active. The paper
balances with auxiliary losses; this configuration balances without, by expert biases, and keeps a small
sequence-wise loss.

    python -m train deepseek_v2_lite --data.paths '/data/*.parquet' --mesh.fsdp 8

Expect: float32 weights and AdamW state take 190 GB, so eight accelerators of 40 GB or more. The published
model saw 5.7 T tokens.
"""

from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.data import DataConfig

config = TrainConfig(
    model=ModelConfig(
        vocab_size=102_400,
        num_layers=27,
        hidden_size=2048,
        mlp_size=10_944,
        max_length=163_840,
        attention=AttentionConfig(
            num_heads=16,
            q_lora_rank=0,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope=RopeConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
        ),
        moe=MoEConfig(
            num_experts=64,
            num_shared_experts=2,
            top_k=6,
            expert_size=1408,
            first_dense=1,
            score="softmax",
            normalize=False,
            routed_scale=1.0,
            bias_step=1e-3,
            sequence_loss=1e-3,
        ),
        tie_embeddings=False,
        dtype="bfloat16",
        remat="full",
    ),
    data=DataConfig(sequence_length=4096, batch_size=512),
    optimizer=OptimizerConfig(learning_rate=4.2e-4, schedule="wsd", warmup_steps=2000),
    checkpoint=CheckpointConfig(directory="runs/deepseek_v2_lite", interval=500),
    mesh=MeshConfig(fsdp=-1),
    steps=1_000_000,
    eval_interval=1000,
    eval_batches=16,
    log_interval=10,
)
