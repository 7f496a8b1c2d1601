"""DeepSeek V4.1 Flash at full size, in MLA form: 549 B parameters, 16.5 B of them active per token.

    python -m train v41_flash --data.paths '/data/*.parquet' --mesh.fsdp 32 --mesh.expert 32

Expect: needs a pod. With float32 weights and AdamW state it takes 6.6 TB of device memory. On fewer devices,
override the shape (`--model.num-layers 2 --model.moe.num-experts 16 ...`) to try the code path.

Taken over: 40 layers of width 5120, 64 heads, latent 512 + 64 rope, q_lora 1280, 384 routed experts of 2304
and a shared one in every layer, the sqrt(softplus) router without groups, routed scale 1.5 with normalised
weights, YaRN with a factor of 16 over 65,536 tokens and theta 160,000, a vocabulary of 129,280.

Chosen here, with the reason:

* MLA with `k_up` and `v_up` per head, where the original keeps one 512-wide vector as both key and value:
  the cache is the latent all the same. Head dims are 128 + 64 and 128, those of DeepSeek-V2 and V3, because
  the original's 448 and 512 belong to the shared vector and would make heads wider than what they read.
* 8 active experts. 8 of 384 is the sparsity of 1 in 48 that fine-grained experts are meant for.
* No dense first layers (`first_dense` 0), and no multi-token prediction.
* Balance by expert biases with steps of 0.001 and a sequence-wise loss of 0.0001, as in DeepSeek-V3.
* mscale_all_dim 1.0: the softmax scale follows YaRN's factor as in DeepSeek-V3.
"""

from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.data import DataConfig

config = TrainConfig(
    model=ModelConfig(
        vocab_size=129_280,
        num_layers=40,
        hidden_size=5120,
        max_length=1_048_576,
        attention=AttentionConfig(
            num_heads=64,
            q_lora_rank=1280,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope=RopeConfig(
                theta=160_000.0, factor=16.0, original_length=65_536, mscale=1.0, mscale_all_dim=1.0
            ),
        ),
        moe=MoEConfig(
            num_experts=384,
            num_shared_experts=1,
            top_k=8,
            expert_size=2304,
            first_dense=0,
            score="sqrt_softplus",
            normalize=True,
            routed_scale=1.5,
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
    checkpoint=CheckpointConfig(directory="runs/v41_flash", interval=500),
    mesh=MeshConfig(fsdp=-1),
    steps=1_000_000,
    eval_interval=1000,
    eval_batches=16,
    log_interval=10,
)
