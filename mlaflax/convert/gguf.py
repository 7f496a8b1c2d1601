"""GGUF files in: Llama, Qwen2 and Qwen3 models with their tokenizers, as checkpoints of this library.

    python -m mlaflax.convert from-gguf FILE OUT

The `gguf` package reads the file and dequantises its blocks, tensor by tensor. What it describes is put in the terms
of a Hugging Face folder, config.json and tensors, which `mlaflax.convert.llama` reads: the weights are the same
numbers that llama.cpp multiplies with, as float32.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mlaflax.config import ConfigError, RopeConfig, require
from mlaflax.convert import llama
from mlaflax.convert.layout import flatten
from mlaflax.convert.write import write_checkpoint
from mlaflax.files import require_new
from mlaflax.model.rope import inverse_frequencies
from mlaflax.tokenizer import Tokenizer

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Names in a GGUF file, without `blk.N.` in layers, and in the weight files of Hugging Face.
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and 3.2 are the models whose files hold rope factors; they are the same function of these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# How text is cut into words before the merges, by `tokenizer.ggml.pre`: a pattern, or None for GPT-2's.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {"gpt-2": None, "smollm": None, "qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}
_CONTROL, _USER_DEFINED = 3, 4


class GGUFFile:
    """One file: its metadata, and its tensors under Hugging Face's names.

    Args:
      path: of the file.

    Raises:
      ConfigError: it is missing, truncated or no GGUF file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        require(self.path.is_file(), "file", str(path), "no such file; it must be a GGUF file")
        try:
            reader = gguf.GGUFReader(self.path)
            self._fields = dict(reader.fields)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # whatever a wrong length or type leads to inside the reader
            reason = str(error).strip().splitlines()
            raise ConfigError(
                f"file = {str(path)!r}: must be a whole GGUF file, and it cannot be read to its end "
                f"({reason[0] if reason else type(error).__name__})"
            ) from None
        self.architecture = str(self("general.architecture", ""))
        allowed = f"must be one of {', '.join(map(repr, _ARCHITECTURES))}"
        known = self.architecture in _ARCHITECTURES
        require(known, "general.architecture", self.architecture, allowed)

    def __call__(self, name: str, *default: Any) -> Any:
        """A value of the metadata; without a default it must be there."""
        field = self._fields.get(name)
        if field is None:
            if not default:
                raise ConfigError(f"{self.path} lacks {name!r}")
            return default[0]
        return field.contents()

    def of_model(self, name: str, *default: Any) -> Any:
        """A value of the metadata that belongs to the architecture."""
        return self(f"{self.architecture}.{name}", *default)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor under its name in the file, dequantised to float32.

        Raises:
          ConfigError: a number format that the reader does not know.
        """
        tensor = self._tensors[name]
        try:
            value = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{name} is {tensor.tensor_type.name}: cannot be dequantised ({error})"
            ) from None
        return np.asarray(value, np.float32)

    def hf_config(self) -> dict[str, Any]:
        """What a config.json would say.

        Raises:
          ConfigError: metadata that is missing, or says what is not supported here.
        """
        heads, width = self.of_model("attention.head_count"), self.of_model("embedding_length")
        experts = self.of_model("expert_count", 0)
        require(not experts, "expert_count", experts, "must be 0: experts are not supported")
        head_dim = int(self.of_model("attention.key_length", width // heads))
        for name in ("attention.value_length", "rope.dimension_count"):
            value = self.of_model(name, head_dim)
            require(value == head_dim, name, value, f"must be the keys' {head_dim}")
        vocabulary = "token_embd.weight"
        require(vocabulary in self._tensors, "tensors", sorted(self._tensors)[:3], f"must hold {vocabulary}")
        return {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": int(self._tensors[vocabulary].shape[1]),
            "num_hidden_layers": self.of_model("block_count"),
            "hidden_size": width,
            "intermediate_size": self.of_model("feed_forward_length"),
            "max_position_embeddings": self.of_model("context_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.of_model("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "sliding_window": self.of_model("attention.sliding_window", None),
            "use_sliding_window": True,
            "rope_parameters": self._rope(head_dim),
            # Stored as float32: 1e-5 comes as 9.999999747378752e-06.
            "rms_norm_eps": float(f"{self.of_model('attention.layer_norm_rms_epsilon'):.6g}"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "hidden_act": "silu",
        }

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = float(f"{self.of_model('rope.freq_base', 10_000.0):.7g}")
        kind = self.of_model("rope.scaling.type", "none")
        require(kind in ("none", "yarn"), "rope.scaling.type", kind, "must be 'none' or 'yarn'")
        linear = self.of_model("rope.scale_linear", 1.0)
        require(linear == 1, "rope.scale_linear", linear, "must be 1: linear scaling is not supported")
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": self.of_model("rope.scaling.factor"),
                "original_max_position_embeddings": self.of_model("rope.scaling.original_context_length"),
            }
        if _ROPE_FACTORS not in self._tensors:
            return {"rope_type": "default", "rope_theta": theta}
        factors = self.tensor(_ROPE_FACTORS)
        found = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": float(f"{factors.max():.4g}"),
            **_LLAMA3,
        }
        config = RopeConfig(
            theta=theta,
            convention="half",
            factor=found["factor"],
            original_length=found["original_max_position_embeddings"],
            beta_slow=found["low_freq_factor"],
            beta_fast=found["high_freq_factor"],
            scaling="llama3",
        )
        plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
        same = factors.shape == plain.shape and np.allclose(
            plain / inverse_frequencies(config, head_dim), factors, rtol=1e-3
        )
        require(same, _ROPE_FACTORS, factors.tolist(), "must be the factors of Llama 3.1's rope scaling")
        return found

    def state_dict(self) -> "Mapping[str, np.ndarray]":
        """The tensors under Hugging Face's names and in its layouts, each dequantised when it is asked for."""
        return _StateDict(self)


class _StateDict(Mapping[str, np.ndarray]):
    def __init__(self, file: GGUFFile):
        self._file = file
        self._names = {_hf_name(name): name for name in file._tensors if name != _ROPE_FACTORS}
        heads = file.of_model("attention.head_count")
        # llama.cpp rotates neighbouring dims in this architecture, so its converter puts the halves of a head between
        # each other.
        self._interleaved = (
            {"q_proj": heads, "k_proj": file.of_model("attention.head_count_kv", heads)}
            if file.architecture == "llama"
            else {}
        )

    def __getitem__(self, name: str) -> np.ndarray:
        value = self._file.tensor(self._names[name])
        for part, heads in self._interleaved.items():
            if f".{part}." in name:
                pairs = value.reshape(heads, -1, 2, *value.shape[1:])
                value = np.ascontiguousarray(np.swapaxes(pairs, 1, 2)).reshape(value.shape)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part, _, kind = part.rpartition(".")
    if block == "blk" and part in _LAYER:
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
    return name  # unknown: the reading of the weights says so


# --- The tokenizer -------------------------------------------------------------------------------------------


def read_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what a tokenizer_config.json says of it: `eos_token`, and others that the file names.

    The chat template is kept there as `chat_template`.

    Raises:
      ConfigError: a kind of tokenizer or a pre-tokenizer that is not known, or no end-of-text token.
    """
    kind, pre = file("tokenizer.ggml.model", None), file("tokenizer.ggml.pre", "gpt-2")
    require(kind == "gpt2", "tokenizer.ggml.model", kind, "must be 'gpt2', a byte-level BPE")
    known = f"must be one of {', '.join(map(repr, _PATTERNS))}"
    require(pre in _PATTERNS, "tokenizer.ggml.pre", pre, known)
    tokens: list[str] = file("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file("tokenizer.ggml.merges")]
    types = file("tokenizer.ggml.token_type", [1] * len(tokens))
    try:
        model = models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:  # the Rust side raises bare Exception
        raise ConfigError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error})") from None
    inner: Any = tokenizers.Tokenizer(model)
    pattern = _PATTERNS[pre]
    steps: list[Any] = []
    if pre == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(_added(tokens, types, _CONTROL))
    inner.add_tokens(_added(tokens, types, _USER_DEFINED))
    named = {}
    for name in ("bos", "eos", "unknown", "padding"):
        index = file(f"tokenizer.ggml.{name}_token_id", None)
        if index is not None:
            require(0 <= index < len(tokens), f"tokenizer.ggml.{name}_token_id", index, "is no token")
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            named[f"{short}_token"] = tokens[index]
    require("eos_token" in named, "tokenizer.ggml.eos_token_id", None, "must name the end of text")
    template = file("tokenizer.chat_template", None)
    if template is not None:
        named["chat_template"] = template
    return Tokenizer(inner, named["eos_token"]), named


def _added(tokens: Sequence[str], types: Sequence[int], kind: int) -> list[AddedToken]:
    special = kind == _CONTROL
    return [
        AddedToken(token, special=special, normalized=False)
        for token, its in zip(tokens, types, strict=True)
        if its == kind
    ]


# --- The whole file ------------------------------------------------------------------------------------------


def from_gguf(path: str | os.PathLike, out: str | os.PathLike) -> int:
    """Write the model and the tokenizer of a GGUF file as a checkpoint, which `load_model` opens, at step 0.

    Returns:
      The number of parameters.

    Raises:
      ConfigError: a file that is damaged or holds what is not supported, naming it, or `out`
        exists; nothing is written.
      CannotDo: `out` cannot be written.
    """
    require_new(pathlib.Path(out), "OUT")
    file = GGUFFile(path)
    config = llama.model_config_from_hf(file.hf_config())
    tokenizer, named = read_tokenizer(file)
    held = tokenizer.vocab_size
    require(held <= config.vocab_size, "tokenizer.ggml.tokens", held, f"must not exceed {config.vocab_size}")
    params = llama.params_from_hf(file.state_dict(), config)
    write_checkpoint(out, config, params, tokenizer, named)
    return sum(value.size for value in flatten(params).values())
