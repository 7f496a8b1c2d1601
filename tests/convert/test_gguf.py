"""GGUF files: written here as llama.cpp's converter lays them out, read back to the weights they were made of."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from mlaflax.checkpoint import load_model
from mlaflax.config import ConfigError, RopeConfig
from mlaflax.convert.__main__ import main
from mlaflax.convert.gguf import GGUFFile, from_gguf
from mlaflax.convert.llama import model_config_from_hf, params_from_hf
from mlaflax.model.rope import inverse_frequencies
from tests.convert.test_llama import same, small

TEXTS = [
    "It was the best of times, it was the worst of times: 1775 and 2024.",
    "the best, the worst, the rest",
]
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(digits=True):
    """A tokenizer of the kind that a file is to be rebuilt into, and its vocabulary and merges."""
    inner = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=ENDS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    inner.train_from_iterator(TEXTS * 3, trainer)
    return inner


def interleaved(weight, heads):
    """What llama.cpp's converter makes of a query or key projection (`LlamaModel.permute`)."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def write(path, config, weights, architecture, *, quantised=False, tokenizer=None, **metadata):
    """A file with these weights; metadata by name, those of the model without its architecture."""
    a = config.attention
    writer = gguf.GGUFWriter(path, metadata.pop("named", architecture))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(a.rope.theta)
    for name, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(name.replace("ARCH", architecture), value)
    if tokenizer is not None:
        ids = tokenizer.get_vocab()
        tokens = sorted(ids, key=ids.__getitem__)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        if "tokenizer.ggml.pre" not in metadata:
            writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in ENDS else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_eos_token_id(ids["<|im_end|>"])
        writer.add_bos_token_id(ids["<|im_start|>"])
        writer.add_chat_template("{{ messages }}")
    for name, value in weights.items():
        if name == "rope_freqs.weight":
            writer.add_tensor(name, value)
            continue
        short = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        base, _, kind = name.rpartition(".")
        if base in short:
            theirs = short[base]
        else:
            *_, layer, block, last = [part for part in base.split(".") if part not in ("self_attn", "mlp")][
                -3:
            ]
            theirs = f"blk.{block}.{NAMES[last]}" if layer == "layers" else base
        heads = {"q_proj": a.num_heads, "k_proj": a.num_kv_heads}.get(base.rpartition(".")[2])
        if architecture == "llama" and heads:
            value = interleaved(value, heads)
        value = np.ascontiguousarray(value)
        if quantised and value.ndim == 2:
            kind_ = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{theirs}.{kind}", gguf.quantize(value, kind_), raw_dtype=kind_)
        else:
            writer.add_tensor(f"{theirs}.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CASES = [("smollm2", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]


@pytest.mark.parametrize(("family", "architecture"), CASES)
def test_the_weights_of_every_architecture_come_back(tmp_path, family, architecture):
    config, weights = small(family)
    write(tmp_path / "model.gguf", config, weights, architecture)
    file = GGUFFile(tmp_path / "model.gguf")
    read = model_config_from_hf(file.hf_config())
    assert read == dataclasses.replace(config, init_std=read.init_std)
    assert same(params_from_hf(file.state_dict(), read), params_from_hf(weights, config))


def test_quantised_blocks_are_dequantised(tmp_path):
    config, weights = small("smollm2", width=64)
    write(tmp_path / "model.gguf", config, weights, "llama", quantised=True)
    got = params_from_hf(GGUFFile(tmp_path / "model.gguf").state_dict(), config)
    want = params_from_hf(weights, config)
    for name in ("q", "k", "v"):
        error = np.abs(got["dense_layers"]["attn"][name] - want["dense_layers"]["attn"][name])
        # Q8_0 rounds to multiples of a block's largest magnitude over 127.
        assert 0 < error.max() < 4.5 / 127


def test_rope_factors_of_llama_3_are_recognised(tmp_path):
    config, weights = small("llama3.1")
    rope = config.attention.rope
    plain = inverse_frequencies(RopeConfig(theta=rope.theta), config.attention.head_dim)
    factors = plain / inverse_frequencies(rope, config.attention.head_dim)
    write(tmp_path / "a.gguf", config, weights | {"rope_freqs.weight": factors}, "llama")
    assert model_config_from_hf(GGUFFile(tmp_path / "a.gguf").hf_config()).attention == config.attention
    write(tmp_path / "b.gguf", config, weights | {"rope_freqs.weight": factors * 1.5}, "llama")
    with pytest.raises(ConfigError, match=r"rope_freqs.weight = .*must be the factors of Llama 3\.1"):
        GGUFFile(tmp_path / "b.gguf").hf_config()


def test_a_file_becomes_a_checkpoint(tmp_path, capsys):
    config, weights = small("smollm2", vocab=300)
    inner = byte_level()
    write(tmp_path / "model.gguf", config, weights, "llama", tokenizer=inner)
    assert main(["from-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 0
    model, tokenizer, read, step = load_model(tmp_path / "out")
    assert step == 0 and read.attention == config.attention
    want = params_from_hf(weights, config)
    np.testing.assert_array_equal(model.dense_layers.attn.k[...], want["dense_layers"]["attn"]["k"])
    for text in [*TEXTS, "In 1984, naïve\n\n  robots"]:
        assert tokenizer.encode(text) == inner.encode(text).ids
    assert tokenizer.encode("in 1775") != byte_level(digits=False).encode("in 1775").ids
    assert tokenizer.eos_id == inner.token_to_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [tokenizer.eos_id]
    assert "{{ messages }}" in (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "out"]
    with pytest.raises(ConfigError, match=r"OUT = .*must be a new or an empty folder"):
        from_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert main(["from-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 2
    assert "must be a new or an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"named": "gemma"},
            "general.architecture = 'gemma': must be one of 'llama', 'qwen2', 'qwen3'",
        ),
        ({"ARCH.expert_count": 8}, "expert_count = 8: must be 0"),
        ({"ARCH.rope.dimension_count": 4}, "rope.dimension_count = 4: must be the keys' 8"),
        ({"ARCH.rope.scaling.type": "linear"}, "rope.scaling.type = 'linear': must be 'none' or 'yarn'"),
        ({"ARCH.attention.sliding_window": 16}, "sliding_window = 16: must be absent or at least"),
        (
            {"tokenizer.ggml.pre": "deepseek-llm"},
            "tokenizer.ggml.pre = 'deepseek-llm': must be one of 'gpt-2'",
        ),
    ],
)
def test_what_is_not_supported_is_named_and_nothing_is_written(tmp_path, metadata, message):
    config, weights = small("smollm2", vocab=300)
    write(tmp_path / "model.gguf", config, weights, "llama", tokenizer=byte_level(), **metadata)
    with pytest.raises(ConfigError, match=message):
        from_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_damaged_files_are_refused_and_nothing_is_written(tmp_path, capsys):
    config, weights = small("smollm2", vocab=300)
    whole = tmp_path / "whole.gguf"
    write(whole, config, weights, "llama", tokenizer=byte_level())
    data = whole.read_bytes()
    part = tmp_path / "part.gguf"
    for length in (0, 3, 20, 1000, len(data) // 2, len(data) - 8):
        part.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"part.gguf': must be a whole GGUF file"):
            from_gguf(part, tmp_path / "out")
    with pytest.raises(ConfigError, match="no such file"):
        from_gguf(tmp_path / "none.gguf", tmp_path / "out")
    assert main(["from-gguf", str(part), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: file = ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part.gguf", "whole.gguf"]


def test_missing_and_unknown_tensors_are_named(tmp_path):
    config, weights = small("smollm2")
    norm = weights.pop("model.layers.1.input_layernorm.weight")
    write(tmp_path / "a.gguf", config, weights, "llama")
    with pytest.raises(ConfigError, match=r"the weights lack model\.layers\.1\.input_layernorm\.weight"):
        params_from_hf(GGUFFile(tmp_path / "a.gguf").state_dict(), config)
    weights["model.layers.1.input_layernorm.weight"] = norm
    weights["model.layers.1.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    write(tmp_path / "b.gguf", config, weights, "llama")
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.1\.self_attn\.q_norm\.weight"):
        params_from_hf(GGUFFile(tmp_path / "b.gguf").state_dict(), config)
