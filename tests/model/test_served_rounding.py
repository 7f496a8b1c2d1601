"""The rounding that training simulates is the rounding that serving does.

The simulated graph (naive form, teacher-forced) against step-by-step decode through the real packed cache.
Float32 sums in another order differ by about 1e-6, so now and then a value lands on the other side of a
rounding boundary; everything else must agree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.cache import LatentCache
from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig
from mlaflax.decode import Engine, EngineConfig, SamplingParams
from mlaflax.formats import Format, get_format
from mlaflax.model import Transformer, init_model

LENGTH = 160
# Share of codes that may lie on the other side of a boundary. bfloat16 keeps 4 bits more than e4m3, so its
# boundaries are 16 times as dense.
SHARE = {"fp8": 1e-4, "bf16": 16e-4}
A = AttentionConfig(num_heads=4, kv_lora_rank=256, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)


def make(format: str) -> tuple[Transformer, jax.Array]:
    config = ModelConfig(
        vocab_size=96, num_layers=3, hidden_size=64, mlp_size=96, max_length=256, init_std=0.15,
        attention=A, moe=MoEConfig(8, 1, 2, 24, first_dense=1), cache_format=format,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 96, (1, LENGTH)).astype(np.int32)
    return init_model(config, seed=4).unstacked(), jnp.asarray(tokens)


def decode(
    model: Transformer, tokens: jax.Array, format: str
) -> tuple[np.ndarray, list[dict[str, jax.Array]]]:
    """Logits of every position, one token at a time, and each layer's stored parts afterwards."""
    cache = LatentCache.create(model.config, format, num_sequences=1, max_length=LENGTH)
    step = jax.jit(lambda token, position, cache: model(token, position, cache=cache)[:2])
    logits = []
    for i in range(LENGTH):
        hidden, cache = step(tokens[:, i : i + 1], jnp.full((1, 1), i), cache)
        logits.append(np.asarray(model.logits(hidden))[0, 0])
    return np.stack(logits), [cache.read(layer, 0, LENGTH) for layer in range(model.config.num_layers)]


class Forced(NamedTuple):
    """A teacher-forced pass: logits, and per layer the entry before rounding and the parts it packs to."""

    logits: np.ndarray
    exact: list[np.ndarray]
    stored: list[dict[str, np.ndarray]]


def teacher_forced(model, tokens, monkeypatch, served=None) -> Forced:
    """Run the simulated graph, recording what each layer would store; with `served`, it reads those bytes."""

    @jax.jit
    def run(tokens, served):
        exact, stored = [], []

        def simulate(fmt, latent, rope, codebook):
            parts = fmt.pack(latent, rope)
            exact.append(latent[0])
            stored.append({name: part[0] for name, part in parts.items()})
            if served is not None:
                parts = {name: part[None] for name, part in served[len(stored) - 1].items()}
            return fmt.unpack_latent(parts), fmt.unpack_rope(parts)

        with monkeypatch.context() as patch:
            patch.setattr(Format, "simulate", simulate)
            logits = model.logits(model(tokens).hidden)[0]
        return logits, exact, stored

    return Forced(*jax.device_get(run(tokens, served)))


def latents(format: str, parts: dict) -> np.ndarray:
    return np.asarray(get_format(format).unpack_latent({k: jnp.asarray(v) for k, v in parts.items()}))


def check_codes(format: str, forced: Forced, served: list[dict], clean: list[np.ndarray]) -> None:
    """Of the `clean` tokens of each layer, few codes differ, each from a value on a rounding boundary."""
    different = 0
    for exact, ours, theirs, rows in zip(forced.exact, forced.stored, served, clean, strict=True):
        differs = (ours["latent"] != np.asarray(theirs["latent"])) & rows[:, None]
        low, high = (
            latents(format, {**ours, "latent": codes}) for codes in (ours["latent"], theirs["latent"])
        )
        boundary = ((low + high) / 2)[differs]
        assert (np.abs(exact[differs] - boundary) <= 1e-5 * np.maximum(1, np.abs(boundary))).all()
        different += differs.sum()
    assert different <= SHARE[format] * np.sum(clean) * A.kv_lora_rank


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_same_bytes_give_the_same_logits(format, monkeypatch):
    model, tokens = make(format)
    served_logits, served = decode(model, tokens, format)
    forced = teacher_forced(model, tokens, monkeypatch, served)
    assert forced.logits.std() > 1
    np.testing.assert_allclose(forced.logits, served_logits, atol=1e-4)
    # Each layer read the served bytes of the layers before it.
    check_codes(format, forced, served, clean=[np.ones(LENGTH, bool)] * len(served))


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_end_to_end_codes_differ_first_on_a_boundary(format, monkeypatch):
    """Each graph reads its own bytes. A code that differs changes what depends on it, later tokens in higher
    layers; wherever nothing upstream differs, the codes are equal but for those on a boundary."""
    model, tokens = make(format)
    _, served = decode(model, tokens, format)
    forced = teacher_forced(model, tokens, monkeypatch)
    clean, upstream = [], np.zeros(LENGTH, bool)
    for ours, theirs in zip(forced.stored, served, strict=True):
        clean.append(~upstream)
        differs = [(ours[name] != np.asarray(theirs[name])).any(1) for name in ("latent", "rope")]
        upstream = upstream | np.logical_or.accumulate(differs[0] | differs[1])
    check_codes(format, forced, served, clean)
    assert np.mean(clean) > 1 / 3, "nothing above the first layer is left to compare"


def test_the_simulation_matters():
    """Without it, teacher-forced logits are not the served ones: the tests above can fail."""
    model, tokens = make("f32")
    served, _ = decode(model, tokens, "fp8")
    logits = jax.jit(lambda tokens: model.logits(model(tokens).hidden)[0])(tokens)
    assert np.abs(np.asarray(logits) - served).max() > 0.1


def test_the_engine_serves_the_simulated_graph():
    """Greedy decoding through the real fp8 cache predicts what the simulated graph predicts."""
    model, tokens = make("fp8")
    prompt = tokens[0, :40].tolist()
    got = Engine(model, config=EngineConfig("fp8", max_sequences=1)).generate(
        [prompt], SamplingParams(temperature=0, max_tokens=30)
    )[0]
    logits = jax.jit(lambda tokens: model.logits(model(tokens).hidden)[0, 39:-1])(
        jnp.asarray([prompt + got.tokens])
    )
    best = np.asarray(logits).max(-1)
    chosen = np.asarray(logits)[np.arange(30), got.tokens]
    assert (best - chosen <= 1e-3).all()
