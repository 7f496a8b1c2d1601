"""Write GGUF files for llama.cpp: `deepseek2` from a DeepseekV3 folder, `llama` from one or with random weights.

MLA goes in with kv_b_proj split into k_b (transposed) and v_b, the form for which llama.cpp keeps only the
latent in its cache and attends in the absorbed form. No vocabulary is written: the benchmark feeds token ids.
"""

import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import load_file

DTYPES = {"f32": np.float32, "f16": np.float16}


class _Writer:
    """A GGUFWriter that stores matrices in one dtype, and in float32 vectors and routers."""

    def __init__(self, path: pathlib.Path, architecture: str, dtype: str):
        self.path = path
        # Written under another name first: a file under the final name is complete.
        self.partial = path.with_suffix(".partial")
        self.gguf = gguf.GGUFWriter(self.partial, architecture)
        self.dtype = DTYPES[dtype]

    def tensor(self, name: str, value: np.ndarray) -> None:
        exact = value.ndim == 1 or "ffn_gate_inp" in name
        self.gguf.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32 if exact else self.dtype))

    def close(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()
        self.partial.rename(self.path)


def _common(out: gguf.GGUFWriter, hf: dict) -> None:
    out.add_name("benchmark")
    out.add_block_count(hf["num_hidden_layers"])
    out.add_context_length(hf["max_position_embeddings"])
    out.add_embedding_length(hf["hidden_size"])
    out.add_feed_forward_length(hf["intermediate_size"])
    out.add_head_count(hf["num_attention_heads"])
    out.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    out.add_vocab_size(hf["vocab_size"])
    out.add_tokenizer_model("none")


def write_mla(folder: str | pathlib.Path, path: str | pathlib.Path, dtype: str) -> pathlib.Path:
    """Write the DeepseekV3 folder `folder` as `path`, matrices in `dtype` (`f32` or `f16`)."""
    folder, path = pathlib.Path(folder), pathlib.Path(path)
    hf = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    h, c, r = hf["num_attention_heads"], hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    n, v, dense = hf["qk_nope_head_dim"], hf["v_head_dim"], hf["first_k_dense_replace"]

    writer = _Writer(path, "deepseek2", dtype)
    out, tensor = writer.gguf, writer.tensor
    _common(out, hf)
    out.add_head_count_kv(1)
    out.add_leading_dense_block_count(dense)
    out.add_q_lora_rank(hf["q_lora_rank"] or 0)  # the key is required; 0 means a plain q_proj
    out.add_kv_lora_rank(c)
    out.add_key_length(c + r)
    out.add_value_length(c)
    out.add_key_length_mla(n + r)
    out.add_value_length_mla(v)
    out.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    out.add_expert_shared_count(hf["n_shared_experts"])
    if dense < hf["num_hidden_layers"]:
        out.add_expert_count(hf["n_routed_experts"])
        out.add_expert_used_count(hf["num_experts_per_tok"])
        out.add_expert_weights_scale(hf["routed_scaling_factor"])
        out.add_expert_weights_norm(hf["norm_topk_prob"])
        out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if hf["n_group"] > 1:
            out.add_expert_group_count(hf["n_group"])
            out.add_expert_group_used_count(hf["topk_group"])
    rope = hf["rope_parameters"]
    out.add_rope_dimension_count(r)
    out.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(rope["factor"])
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        out.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])

    tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    tensor("output_norm.weight", weights["model.norm.weight"])
    if not hf["tie_word_embeddings"]:
        tensor("output.weight", weights["lm_head.weight"])
    for i in range(hf["num_hidden_layers"]):
        layer, block = f"model.layers.{i}.", f"blk.{i}."
        attn, ffn = layer + "self_attn.", layer + "mlp."
        renamed = {
            "attn_norm.weight": layer + "input_layernorm.weight",
            "ffn_norm.weight": layer + "post_attention_layernorm.weight",
            "attn_q.weight": attn + "q_proj.weight",
            "attn_q_a.weight": attn + "q_a_proj.weight",
            "attn_q_a_norm.weight": attn + "q_a_layernorm.weight",
            "attn_q_b.weight": attn + "q_b_proj.weight",
            "attn_kv_a_mqa.weight": attn + "kv_a_proj_with_mqa.weight",
            "attn_kv_a_norm.weight": attn + "kv_a_layernorm.weight",
            "attn_output.weight": attn + "o_proj.weight",
            "ffn_gate_inp.weight": ffn + "gate.weight",
            "exp_probs_b.bias": ffn + "gate.e_score_correction_bias",
        }
        for matrix in ("gate", "up", "down"):
            renamed[f"ffn_{matrix}.weight"] = f"{ffn}{matrix}_proj.weight"
            renamed[f"ffn_{matrix}_shexp.weight"] = f"{ffn}shared_experts.{matrix}_proj.weight"
        # A layer has the tensors of its kind: either query form, a dense MLP or experts.
        for name, source in renamed.items():
            if source in weights:
                tensor(block + name, weights[source])
        kv_b = weights[attn + "kv_b_proj.weight"].reshape(h, n + v, c)
        tensor(block + "attn_k_b.weight", kv_b[:, :n].transpose(0, 2, 1))
        tensor(block + "attn_v_b.weight", kv_b[:, n:])
        if i >= dense:
            for matrix in ("gate", "up", "down"):
                experts = [
                    weights[f"{ffn}experts.{e}.{matrix}_proj.weight"] for e in range(hf["n_routed_experts"])
                ]
                tensor(f"{block}ffn_{matrix}_exps.weight", np.stack(experts))
    writer.close()
    return path


def write_llama(folder: str | pathlib.Path, path: str | pathlib.Path, dtype: str) -> pathlib.Path:
    """Write the Llama folder `folder` as `path`, matrices in `dtype` (`f32` or `f16`)."""
    folder, path = pathlib.Path(folder), pathlib.Path(path)
    hf = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    h, kv = hf["num_attention_heads"], hf["num_key_value_heads"]
    writer = _Writer(path, "llama", dtype)
    out, tensor = writer.gguf, writer.tensor
    _common(out, hf)
    out.add_head_count_kv(kv)
    out.add_rope_dimension_count(hf["head_dim"])
    out.add_rope_freq_base(hf["rope_parameters"]["rope_theta"])
    tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    tensor("output_norm.weight", weights["model.norm.weight"])
    if not hf["tie_word_embeddings"]:
        tensor("output.weight", weights["lm_head.weight"])

    def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
        # llama.cpp rotates neighbouring dims, where Hugging Face's weights are made for the halves of a head.
        return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    for i in range(hf["num_hidden_layers"]):
        layer, block = f"model.layers.{i}.", f"blk.{i}."
        tensor(block + "attn_norm.weight", weights[layer + "input_layernorm.weight"])
        tensor(block + "ffn_norm.weight", weights[layer + "post_attention_layernorm.weight"])
        attn = layer + "self_attn."
        tensor(block + "attn_q.weight", interleaved(weights[attn + "q_proj.weight"], h))
        tensor(block + "attn_k.weight", interleaved(weights[attn + "k_proj.weight"], kv))
        tensor(block + "attn_v.weight", weights[attn + "v_proj.weight"])
        tensor(block + "attn_output.weight", weights[attn + "o_proj.weight"])
        for matrix in ("gate", "up", "down"):
            tensor(f"{block}ffn_{matrix}.weight", weights[f"{layer}mlp.{matrix}_proj.weight"])
    writer.close()
    return path


def write_gqa(hf: dict, path: str | pathlib.Path, dtype: str, seed: int = 0) -> pathlib.Path:
    """Write a Llama model of `hf`'s shape (see `shapes.GQA`) with random weights as `path`."""
    path = pathlib.Path(path)
    rng = np.random.default_rng(seed)
    d, h, kv, width = (
        hf[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    writer = _Writer(path, "llama", dtype)
    out = writer.gguf
    _common(out, hf)
    out.add_head_count_kv(kv)
    out.add_key_length(width)
    out.add_value_length(width)
    out.add_rope_dimension_count(width)

    def normal(name, *shape):
        writer.tensor(name, rng.standard_normal(shape, np.float32) * np.float32(0.02))

    normal("token_embd.weight", hf["vocab_size"], d)
    writer.tensor("output_norm.weight", np.ones(d))
    for i in range(hf["num_hidden_layers"]):
        block = f"blk.{i}."
        writer.tensor(block + "attn_norm.weight", np.ones(d))
        writer.tensor(block + "ffn_norm.weight", np.ones(d))
        normal(block + "attn_q.weight", h * width, d)
        normal(block + "attn_k.weight", kv * width, d)
        normal(block + "attn_v.weight", kv * width, d)
        normal(block + "attn_output.weight", d, h * width)
        normal(block + "ffn_gate.weight", hf["intermediate_size"], d)
        normal(block + "ffn_up.weight", hf["intermediate_size"], d)
        normal(block + "ffn_down.weight", d, hf["intermediate_size"])
    writer.close()
    return path
