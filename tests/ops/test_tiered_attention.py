"""Tiered attention against each query's own view, worked out token by token in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax.config import MixedConfig
from mlaflax.ops.attention import attention, tiered_attention

H, N, V = 3, 6, 5


def inputs(length: int, seed: int = 0, batch: int = 2):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=(batch, length, H, *shape)).astype(np.float32)

    q, k, v = 2 * draw(N), draw(N), draw(V)
    # What rounding does, exaggerated: every element of hot and cold differs.
    return q, (k + 0.1 * draw(N), v), (k, v + 0.5 * draw(V))


def by_hand(q, hot, cold, segments, scale, config: MixedConfig):
    """Output and sets of kept tokens of one row, from the definitions."""
    length, t = len(q), config.page
    out = np.zeros((length, H, V))
    kept_at = []
    # Attention that each token got from the probes since it came, in float64.
    mass, probes = np.zeros(length), np.zeros(length)
    kept: list[int] = []
    start = 0
    for i in range(length):
        if i == 0 or segments[i] != segments[i - 1]:
            start, kept = i, []
            mass[:], probes[:] = 0, 0
        local = i - start
        page = local // t
        if local % t == 0 and page >= config.ring:
            leaving = range(start + (page - config.ring) * t, start + (page - config.ring + 1) * t)
            old = [*kept, *leaving]
            sinks = [j for j in old if j - start < config.sinks]
            worth = {j: mass[j] / max(probes[j], 1) for j in old if j not in sinks}
            kept = [*sinks, *sorted(worth, key=lambda j: -worth[j])[: config.salient]]
        if i % t == 0:
            kept_at.append(set(kept))
        if segments[i] == 0:
            continue
        near = range(start + max(0, (page - config.ring + 1) * t), i + 1)
        is_hot = [j in near or j in kept for j in range(start, i + 1)]
        keys, values = (
            np.stack([(hot if warm else cold)[part][start + n] for n, warm in enumerate(is_hot)])
            for part in (0, 1)
        )
        scores = np.einsum("hn,khn->hk", q[i].astype(np.float64), keys) * scale
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[i] = np.einsum("hk,khv->hv", weights, values)
        if local % config.probe_stride == 0:
            for n, warm in enumerate(is_hot):
                if warm:
                    mass[start + n] += weights[:, n].sum()
                    probes[start + n] += 1
    return out, kept_at


def check(length, segments, config, seed=0):
    q, hot, cold = inputs(length, seed, len(segments))
    out, kept = tiered_attention(q, hot, cold, jnp.asarray(segments), scale=0.4, config=config)
    assert np.isfinite(out).all()
    for row, segment in enumerate(segments):
        expected, sets = by_hand(q[row], [x[row] for x in hot], [x[row] for x in cold], segment, 0.4, config)
        for page, these in enumerate(sets):
            got = np.asarray(kept[page, row])
            if segment[page * config.page]:
                assert set(got[got >= 0].tolist()) == these
        np.testing.assert_allclose(out[row], expected, atol=2e-5)


@settings(max_examples=6, deadline=None)
@given(
    length=st.integers(1, 70),
    page=st.sampled_from([2, 4, 8]),
    window=st.integers(0, 3),
    sinks=st.sampled_from([0, 1, 3]),
    salient=st.sampled_from([0, 1, 5]),
    stride=st.sampled_from([1, 2]),
    seed=st.integers(0, 3),
)
def test_every_query_reads_its_own_view(length, page, window, sinks, salient, stride, seed):
    config = MixedConfig(
        page=page, window=window * page, sinks=min(sinks, page), salient=salient, probe_stride=stride
    )
    check(length, np.ones((2, length), np.int32), config, seed)


def test_packed_documents_choose_for_themselves():
    segments = np.repeat(
        [[1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]], 4, axis=1
    )
    segments[0, 22:24] = 0  # the second document does not fill its last page
    check(48, segments.astype(np.int32), MixedConfig(page=4, window=4, sinks=1, salient=3, probe_stride=2))


def test_equal_roundings_are_plain_attention():
    q, hot, _ = inputs(90)
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 1, 1]], [30, 30, 30], axis=1).astype(np.int32))
    config = MixedConfig(page=8, window=16, sinks=2, salient=4, probe_stride=4)
    out, _ = tiered_attention(q, hot, hot, segments, scale=0.3, config=config)
    expected = attention(q, *hot, segments, scale=0.3, implementation="reference")
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("config", [
    MixedConfig(page=4, window=4, sinks=1, salient=3, probe_stride=2),
    pytest.param(
        MixedConfig(page=4, window=0, sinks=0, salient=0, probe_stride=4), marks=pytest.mark.slow
    ),
    MixedConfig(page=64, window=64, sinks=1, salient=0, probe_stride=4),
])  # fmt: skip
def test_gradients_are_those_of_softmax_over_the_same_view(config):
    """Against automatic differentiation of one softmax over the rows' views, the kept tokens given."""
    length = 61
    q, hot, cold = inputs(length, batch=1)
    segments = jnp.asarray(np.repeat([[1, 2]], [40, 21], axis=1).astype(np.int32))
    _, kept = tiered_attention(q, hot, cold, segments, scale=0.4, config=config)
    row, t = np.arange(length), config.page
    is_hot = row[None, :] >= ((row // t - config.ring + 1) * t)[:, None]
    for i in range(length):
        is_hot[i, [j for j in np.asarray(kept[i // t, 0]) if j >= 0]] = True
    same = np.asarray(segments[0])[:, None] == np.asarray(segments[0])
    causal = (row[:, None] >= row) & same

    def expected(q, hot, cold):
        def scores(k):
            return jnp.einsum("bqhn,bkhn->bhqk", q, k) * 0.4

        logits = jnp.where(is_hot, scores(hot[0]), scores(cold[0]))
        weights = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)
        parts = (
            jnp.einsum("bhqk,bkhv->bqhv", jnp.where(m, weights, 0), v[1])
            for m, v in ((is_hot, hot), (~is_hot, cold))
        )
        return jnp.sum(jnp.sin(sum(parts)))

    def ours(q, hot, cold):
        return jnp.sum(jnp.sin(tiered_attention(q, hot, cold, segments, scale=0.4, config=config)[0]))

    got, want = (jax.grad(f, argnums=(0, 1, 2))(q, hot, cold) for f in (ours, expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_no_array_of_length_by_length():
    config = MixedConfig(page=32, window=32, sinks=1, salient=7, probe_stride=8)
    shape = jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

    def run(q, k, v, segments):
        return jnp.sum(tiered_attention(q, (k, v), (k, v), segments, scale=1.0, config=config)[0])

    compiled = jax.jit(jax.grad(run, argnums=(0, 1, 2))).lower(shape, shape, shape, segments).compile()
    analysis = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < 2048 * 2048 * 4


def test_shapes_that_do_not_belong_together_are_refused():
    q, hot, cold = inputs(8)
    with pytest.raises(ValueError, match="do not belong together"):
        tiered_attention(
            q, hot, (cold[0][:, :4], cold[1]), jnp.ones((2, 8), jnp.int32), scale=1.0, config=MixedConfig()
        )
