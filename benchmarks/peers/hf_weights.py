"""Write a Hugging Face DeepseekV3 folder (config.json, model.safetensors) with random weights.

    python -m benchmarks.peers.hf_weights FOLDER [--seed 0]

writes the model of the decode comparison; `write` takes any `ModelConfig`. Every peer that can read a folder
gets the same weights, and so does mlaflax.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save_file

from benchmarks.peers import shapes


def tensors(hf: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a DeepseekV3 checkpoint; matrices are [out, in]."""
    d, h = hf["hidden_size"], hf["num_attention_heads"]
    c, r, n, v = hf["kv_lora_rank"], hf["qk_rope_head_dim"], hf["qk_nope_head_dim"], hf["v_head_dim"]
    lora, e = hf["q_lora_rank"], hf["n_routed_experts"]

    def mlp(prefix, width):
        yield prefix + "gate_proj.weight", (width, d)
        yield prefix + "up_proj.weight", (width, d)
        yield prefix + "down_proj.weight", (d, width)

    yield "model.embed_tokens.weight", (hf["vocab_size"], d)
    yield "model.norm.weight", (d,)
    if not hf["tie_word_embeddings"]:
        yield "lm_head.weight", (hf["vocab_size"], d)
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attn, ffn = layer + "self_attn.", layer + "mlp."
        yield layer + "input_layernorm.weight", (d,)
        yield layer + "post_attention_layernorm.weight", (d,)
        if lora:
            yield attn + "q_a_proj.weight", (lora, d)
            yield attn + "q_a_layernorm.weight", (lora,)
            yield attn + "q_b_proj.weight", (h * (n + r), lora)
        else:
            yield attn + "q_proj.weight", (h * (n + r), d)
        yield attn + "kv_a_proj_with_mqa.weight", (c + r, d)
        yield attn + "kv_a_layernorm.weight", (c,)
        yield attn + "kv_b_proj.weight", (h * (n + v), c)
        yield attn + "o_proj.weight", (d, h * v)
        if i < hf["first_k_dense_replace"]:
            yield from mlp(ffn, hf["intermediate_size"])
            continue
        yield ffn + "gate.weight", (e, d)
        yield ffn + "gate.e_score_correction_bias", (e,)
        for j in range(e):
            yield from mlp(f"{ffn}experts.{j}.", hf["moe_intermediate_size"])
        yield from mlp(ffn + "shared_experts.", hf["moe_intermediate_size"] * hf["n_shared_experts"])


def write(config, folder: str | pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Write a `ModelConfig` with float32 weights: normal with its init_std, norms 1, router bias 0."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf = shapes.deepseek_v3(config)
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensors(hf):
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            weights[name] = rng.standard_normal(shape, np.float32) * np.float32(hf["initializer_range"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "float32",
    } | hf
    # The configuration is written last: a folder that has one is complete.
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write(shapes.mla_config(), arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
