"""The golden files: models small enough to write their logits down, their weights as a formula.

A file `golden/NAME.npz` holds `config` (config.json), `shapes` (of the weights, by name in the DeepSeek
files), `seed`, three documents of tokens and the float32 logits that transformers gives each of them alone.
`make_golden.py` writes them.
"""

import dataclasses
import json
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np

DIRECTORY = pathlib.Path(__file__).parent / "golden"
LENGTHS = (160, 97, 41)
PAD = 3  # an ordinary token, which the documents use too: padding must not be told by its value

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,  # two of three documents go beyond it
    "beta_fast": 32,
    "beta_slow": 1,
}
# The proportions of the released models: r = n / 2, c = 2 n (4 n there), f < d < mlp, dense layers first.
_COMMON = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 320,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2560,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_V2 = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
}
_V3 = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# Their epsilon is far from the one of the latents (1e-6), so that mixing them up shows.
CONFIGS: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite
    "v2_lite": _V2 | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-2,
        "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    # DeepSeek-V2, the two mscales told apart
    "v2": _V2 | {
        "q_lora_rank": 48,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rms_norm_eps": 1e-2,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    # DeepSeek-V3
    "v3": _V3 | {
        "q_lora_rank": 48,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "rms_norm_eps": 1e-2,
        "rope_interleave": True,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    # V3 without groups or query latent, half-split rope, values narrower than keys
    "v3_plain": _V3 | {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "v_head_dim": 24,
        "rms_norm_eps": 1e-2,
        "rope_interleave": False,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.6},
    },
}  # fmt: skip

# Standard deviation of the weights by the end of their name: (times 1 / sqrt(inputs)?, deviation, mean).
# Queries are strong enough for attention to be peaked; biases put many biased scores below 0.
_SCALES = {
    "embed_tokens.weight": (False, 1.0, 0.0),
    "norm.weight": (False, 0.2, 1.0),
    "q_proj.weight": (True, 1.5, 0.0),
    "q_b_proj.weight": (True, 1.5, 0.0),
    "mlp.gate.weight": (True, 1.0, 0.0),
    "e_score_correction_bias": (False, 0.25, -0.75),
    "lm_head.weight": (True, 1.1, 0.0),
}


def uniform(name: str, seed: int, count: int) -> np.ndarray:
    """`count` numbers in [-1, 1), from splitmix64 (doi:10.1145/2660193.2660195) seeded by `seed` and `name`.

    Integer arithmetic: no version of any library can change the weights.
    """
    with np.errstate(over="ignore"):
        start = np.uint64(zlib.crc32(f"{seed}:{name}".encode()) << 32)
        z = (start + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def make_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Float32 weights of the given names and shapes in the DeepSeek files: uniform, scaled by `_SCALES`."""
    weights = {}
    for name, shape in shapes.items():
        fan_in, std, mean = next((s for end, s in _SCALES.items() if name.endswith(end)), (True, 1.0, 0.0))
        std *= 3**0.5 / (max(shape[-1], 1) ** 0.5 if fan_in else 1)
        values = mean + std * uniform(name, seed, int(np.prod(shape)))
        weights[name] = values.reshape(shape).astype(np.float32)
    return weights


def make_documents(seed: int, vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    """Random token ids, int32, one array per document."""
    draws = (uniform(f"document {i}", seed, n) for i, n in enumerate(lengths))
    return [((u + 1) / 2 * vocab_size).astype(np.int32) for u in draws]


@dataclasses.dataclass
class Golden:
    """One golden file: `documents[i]` int32 `[n]` gives `logits[i]` float32 `[n, w]`."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    seed: int
    documents: list[np.ndarray]
    logits: list[np.ndarray]

    def weights(self) -> dict[str, np.ndarray]:
        return make_weights(self.shapes, self.seed)

    def save(self, name: str) -> None:
        np.savez_compressed(
            DIRECTORY / f"{name}.npz",
            config=np.array(json.dumps(self.config)),
            shapes=np.array(json.dumps(self.shapes)),
            seed=np.array(self.seed),
            documents=np.concatenate(self.documents),
            lengths=np.array([len(d) for d in self.documents]),
            logits=np.concatenate(self.logits),
        )


def load(name: str) -> Golden:
    with np.load(DIRECTORY / f"{name}.npz") as f:
        cuts = np.cumsum(f["lengths"])[:-1]
        return Golden(
            config=json.loads(str(f["config"])),
            shapes={k: tuple(v) for k, v in json.loads(str(f["shapes"])).items()},
            seed=int(f["seed"]),
            documents=np.split(f["documents"], cuts),
            logits=np.split(f["logits"], cuts),
        )


class Batch(NamedTuple):
    """Documents laid out for one call, int32 `[b, q]` each; `place` says which lies where."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    place: list[tuple[int, tuple[int, slice]]]

    def error(self, logits: np.ndarray, expected: list[np.ndarray]) -> float:
        """Largest absolute difference from each document's logits over every real position; NaN is infinite."""
        worst = max(np.abs(np.asarray(logits[at], np.float64) - expected[i]).max() for i, at in self.place)
        return float(np.nan_to_num(worst, nan=np.inf))


def lay_out(documents: list[np.ndarray], layout: str) -> Batch:
    """Documents in three rows, the first of them 160 wide: one shape, one compilation for all layouts.

    `alone`: the first document in every row, no padding. `left`, `right`: a document per row, padded.
    `packed`: the first; the second and third; the third and second; padding after them.
    """
    rows = {"alone": [[0], [0], [0]], "packed": [[0], [1, 2], [2, 1]]}.get(layout, [[0], [1], [2]])
    width = len(documents[0])
    tokens = np.full((len(rows), width), PAD, np.int32)
    positions, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    place = []
    for row, held in enumerate(rows):
        start = width - len(documents[row]) if layout == "left" else 0
        for segment, i in enumerate(held, 1):
            n = len(documents[i])
            at = (row, slice(start, start + n))
            tokens[at], positions[at], segment_ids[at] = documents[i], np.arange(n), segment
            place.append((i, at))
            start += n
    return Batch(tokens, positions, segment_ids, place)
