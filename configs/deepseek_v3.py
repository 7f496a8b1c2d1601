"""DeepSeek-V3 (arXiv:2412.19437): 671.0 B parameters, 36.6 B of them active per token.

The embedding, of which a token reads one row, is not counted as active: the paper says 37 B, the model's
own notes 36.7 B. The multi-token prediction layer is not part of the model. Context is extended from 4,096
tokens by YaRN with a factor of 40.

    python -m train deepseek_v3 --data.paths '/data/*.parquet' --mesh.fsdp 32 --mesh.expert 32

Expect: needs a pod. With float32 weights and AdamW state it takes 8 TB of device memory, hence hundreds of
accelerators. On fewer, override the shape (`--model.num-layers 4 ...`) to try the code path.
"""

from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.data import DataConfig

config = TrainConfig(
    model=ModelConfig(
        vocab_size=129_280,
        num_layers=61,
        hidden_size=7168,
        mlp_size=18_432,
        max_length=163_840,
        attention=AttentionConfig(
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope=RopeConfig(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
        ),
        moe=MoEConfig(
            num_experts=256,
            num_shared_experts=1,
            top_k=8,
            expert_size=2048,
            first_dense=3,
            num_groups=8,
            top_groups=4,
            group_score="top2",
            score="sigmoid",
            normalize=True,
            routed_scale=2.5,
            bias_step=1e-3,
            sequence_loss=1e-4,
        ),
        tie_embeddings=False,
        init_std=0.006,
        dtype="bfloat16",
        remat="full",
    ),
    data=DataConfig(sequence_length=4096, batch_size=3072),
    optimizer=OptimizerConfig(learning_rate=2.2e-4, schedule="wsd", warmup_steps=2000, accumulation=3),
    checkpoint=CheckpointConfig(directory="runs/deepseek_v3", interval=500),
    mesh=MeshConfig(fsdp=-1),
    steps=1_000_000,
    eval_interval=1000,
    eval_batches=16,
    log_interval=10,
)
