"""Every implementation of `mla_decode` against a float64 loop in NumPy over tokens, page by page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from mlaflax.formats import GAUSSIAN_CODEBOOK, get_format
from mlaflax.ops.mla_decode import api, merge_lse, mla_decode, xla

PAGE, C, R, H = 16, 32, 8, 3
IMPLEMENTATIONS = ["reference", "xla"]
# After the slash, the format of the rope key.
FORMATS = ["f32", "bf16", "fp8", "int8", "fp4", "nuq4", "fp8/fp8", "nuq4/fp8"]


def make_pool(format: str, num_pages: int, seed: int = 0):
    """A pool of random tokens, and what each token reads as in float64: `[pages, t, c + r]`."""
    rng = np.random.default_rng(seed)
    fmt = get_format(*format.split("/"))
    tokens = jnp.asarray(rng.standard_normal((num_pages, PAGE, C + R)), jnp.float32)
    codebook = {"codebook": jnp.asarray(GAUSSIAN_CODEBOOK) * 1.1} if fmt.codebook else {}
    packed = jax.jit(fmt.pack)(tokens[..., :C], tokens[..., C:], *codebook.values())
    read = fmt.unpack_latent({**packed, **codebook}), fmt.unpack_rope(packed)
    pool = {name: part if name == "latent" else jnp.swapaxes(part, 1, 2) for name, part in packed.items()}
    return fmt, {**pool, **codebook}, np.concatenate(read, -1).astype(np.float64)


def expected(q, q_pos, values, table, page_pos, mask, scale):
    b, nq, h, _ = q.shape
    out, lse = np.zeros((b, nq, h, C)), np.full((b, nq, h), -np.inf)
    for i in range(b):
        for j in range(nq):
            keys = [
                values[table[i, p], t]
                for p in range(table.shape[1])
                for t in range(PAGE)
                if page_pos[i, p] >= 0
                and page_pos[i, p] + t <= q_pos[i, j]
                and (mask is None or mask[i, p, t])
            ]
            if not keys:
                continue
            keys = np.stack(keys)
            scores = q[i, j].astype(np.float64) @ keys.T * scale
            peak = scores.max(-1, keepdims=True)
            weights = np.exp(scores - peak)
            out[i, j] = weights @ keys[:, :C] / weights.sum(-1, keepdims=True)
            lse[i, j] = peak[:, 0] + np.log(weights.sum(-1))
    return out, lse


def check(implementation, format, lengths, num_queries=1, shuffle=False, masked=0.0, seed=0, scale=0.3):
    rng = np.random.default_rng(seed)
    b, p = len(lengths), max(1, -(-max(lengths) // PAGE))
    fmt, pool, values = make_pool(format, b * p + 2, seed)
    table = rng.permutation(b * p + 2)[: b * p].reshape(b, p).astype(np.int32)
    page_pos = np.tile(np.arange(p, dtype=np.int32) * PAGE, (b, 1))
    for i, n in enumerate(lengths):
        unused = page_pos[i] >= n
        table[i, unused], page_pos[i, unused] = -1, -1
    if shuffle:
        order = np.stack([rng.permutation(p) for _ in range(b)])
        table, page_pos = np.take_along_axis(table, order, 1), np.take_along_axis(page_pos, order, 1)
    mask = None if not masked else rng.random((b, p, PAGE)) >= masked
    q = rng.standard_normal((b, num_queries, H, C + R)).astype(np.float32) * 2
    q_pos = (np.array(lengths)[:, None] - num_queries + np.arange(num_queries)).astype(np.int32)
    out, lse = jax.jit(mla_decode, static_argnames=("format", "scale", "implementation"))(
        q, q_pos, pool, table, page_pos, mask, format=fmt, scale=scale, implementation=implementation
    )
    want_out, want_lse = expected(q, q_pos, values, table, page_pos, mask, scale)
    np.testing.assert_allclose(out, want_out, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two pages, so that these short contexts loop."""
    monkeypatch.setattr(xla, "MAX_BLOCK_TOKENS", 2 * PAGE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_ragged_batch_with_every_edge_of_a_page(implementation, format):
    check(implementation, format, [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_queries", [2, 5, 8])
def test_several_query_positions_are_causal(implementation, num_queries):
    # The sequence of 1 token has queries before its start: positions below 0 see nothing.
    check(implementation, "f32", [1, 40, 3 * PAGE], num_queries=num_queries)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_in_any_order_and_masked_tokens(implementation):
    check(implementation, "bf16", [90, 33, 7], num_queries=3, shuffle=True, masked=0.4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_everything_masked_is_nothing_seen(implementation):
    check(implementation, "f32", [40, 12], masked=1.1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_a_context_merge_into_the_whole(implementation):
    rng = np.random.default_rng(4)
    fmt, pool, _ = make_pool("f32", 7)
    q = jnp.asarray(rng.standard_normal((1, 2, H, C + R)), jnp.float32)
    q_pos = jnp.array([[99, 100]], jnp.int32)
    table, page_pos = jnp.arange(7)[None], (jnp.arange(7) * PAGE)[None]
    run = lambda cut: mla_decode(  # noqa: E731
        q, q_pos, pool, table[:, cut], page_pos[:, cut], format=fmt, scale=0.3, implementation=implementation
    )
    whole = run(slice(None))
    parts = [run(slice(5, 7)), run(slice(0, 2)), run(slice(2, 5))]
    for got, want in zip(merge_lse(*parts), whole, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    nothing = (jnp.full_like(whole[0], 7.0), jnp.full_like(whole[1], -jnp.inf))
    for got, want in zip(merge_lse(nothing, whole), whole, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.isneginf(merge_lse(nothing, nothing)[1]).all()
    assert (merge_lse(nothing, nothing)[0] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_queries_and_exact_latents_match_finite_differences(implementation):
    rng = np.random.default_rng(5)
    fmt, pool, _ = make_pool("f32", 4)
    q = jnp.asarray(rng.standard_normal((1, 1, H, C + R)), jnp.float32)
    table, page_pos = jnp.arange(4)[None], (jnp.arange(4) * PAGE)[None]
    weight = jnp.asarray(rng.standard_normal((1, 1, H, C)), jnp.float32)

    def loss(q, latent):
        out, lse = mla_decode(
            q, jnp.array([[55]]), {**pool, "latent": latent}, table, page_pos,
            format=fmt, scale=0.3, implementation=implementation,
        )  # fmt: skip
        return jnp.sum(out * weight) + jnp.sum(lse)

    check_grads(loss, (q, pool["latent"]), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("format", ["fp4/fp8", "nuq4"])
def test_queries_have_the_same_gradient_through_packed_pools(format):
    rng = np.random.default_rng(6)
    fmt, pool, _ = make_pool(format, 4)
    q = jnp.asarray(rng.standard_normal((1, 1, H, C + R)), jnp.float32)
    table, page_pos = jnp.arange(4)[None], (jnp.arange(4) * PAGE)[None]

    def loss(q, implementation):
        out, lse = mla_decode(
            q, jnp.array([[55]]), pool, table, page_pos, format=fmt, scale=0.3, implementation=implementation
        )
        return jnp.sum(out**2) + jnp.sum(lse)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(gradient(q, "xla"), gradient(q, "reference"), atol=1e-5, rtol=1e-4)


def test_work_ends_with_the_last_visible_page():
    """A page that no query can see is not read: NaN in it would poison the output through 0 * NaN."""
    fmt, pool, _ = make_pool("f32", 8)
    pool = {name: part.at[4:].set(jnp.nan) for name, part in pool.items()}
    q = jnp.ones((1, 1, H, C + R))
    table, page_pos = jnp.arange(8)[None], (jnp.arange(8) * PAGE)[None]
    out, lse = mla_decode(
        q, jnp.array([[4 * PAGE - 1]]), pool, table, page_pos, format=fmt, scale=0.3, implementation="xla"
    )
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_bad_arguments_are_named():
    fmt, pool, _ = make_pool("f32", 2)
    good = {"q": jnp.ones((1, 1, H, C + R)), "q_pos": jnp.zeros((1, 1), int), "block_table": jnp.zeros((1, 2), int),
                "page_pos": jnp.zeros((1, 2), int), "pool": pool}  # fmt: skip
    for bad, message in (
        ({"q": jnp.ones((1, 1, H, C))}, "q has width 32: must be the latent's 32 plus the rope's 8"),
        ({"q_pos": jnp.zeros((2, 1), int)}, r"q_pos has shape \(2, 1\): must be \(1, 1\)"),
        ({"page_pos": jnp.zeros((1, 3), int)}, r"must be \(1, 3\)"),
        ({"mask": jnp.ones((1, 2), bool)}, r"mask has shape \(1, 2\): must be \(1, 2, 16\)"),
        ({"implementation": "cuda"}, "implementation = 'cuda': must be one of reference, xla"),
        ({"format": get_format("fp8")}, "format fp8 needs"),
        (
            {"format": get_format("nuq4"), "q": jnp.ones((1, 1, H, 2 * C + R))},
            "format nuq4 needs .*'codebook'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            api.mla_decode(**{**good, "format": fmt, "scale": 1.0, **bad})
