"""Every implementation of `gqa_decode` against a float64 loop in NumPy over sequences, queries and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.formats import get_format
from mlaflax.ops.gqa_decode import api, gqa_decode, xla
from mlaflax.ops.mla_decode import merge_lse

PAGE, N, V, H = 16, 8, 12, 6
IMPLEMENTATIONS = ["reference", "xla"]


def make_pool(format, num_pages, seed=0):
    """A pool of random keys and values, and what each token's value and key read as in float64."""
    rng = np.random.default_rng(seed)
    fmt = get_format(format)
    value, key = (jnp.asarray(rng.standard_normal((num_pages, PAGE, n)), jnp.float32) for n in (V, N))
    packed = fmt.pack(value, key)
    read = fmt.unpack_latent(packed), fmt.unpack_rope(packed)
    pool = {"latent": packed["latent"], "rope": jnp.swapaxes(packed["rope"], 1, 2)}
    return fmt, pool, *(np.asarray(x, np.float64) for x in read)


def expected(q, q_pos, values, keys, table, page_pos, mask, scale):
    b, nq, h, _ = q.shape
    g = table.shape[1]
    out, lse = np.zeros((b, nq, h, V)), np.full((b, nq, h), -np.inf)
    for i in range(b):
        for j in range(nq):
            seen = [
                (p, t)
                for p in range(table.shape[2])
                for t in range(PAGE)
                if page_pos[i, p] >= 0
                and page_pos[i, p] + t <= q_pos[i, j]
                and (mask is None or mask[i, p, t])
            ]
            for head in range(h) if seen else ():
                pages = table[i, head * g // h]
                k = np.stack([keys[pages[p], t] for p, t in seen])
                v = np.stack([values[pages[p], t] for p, t in seen])
                scores = k @ q[i, j, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[i, j, head] = weights @ v / weights.sum()
                lse[i, j, head] = scores.max() + np.log(weights.sum())
    return out, lse


def arguments(lengths, groups, num_queries=1, shuffle=False, masked=0.0, format="f32", seed=0):
    rng = np.random.default_rng(seed)
    b, p = len(lengths), max(1, -(-max(lengths) // PAGE))
    fmt, pool, values, keys = make_pool(format, b * groups * p + 2, seed)
    table = rng.permutation(b * groups * p + 2)[: b * groups * p].reshape(b, groups, p).astype(np.int32)
    page_pos = np.tile(np.arange(p, dtype=np.int32) * PAGE, (b, 1))
    for i, n in enumerate(lengths):
        unused = page_pos[i] >= n
        table[i, :, unused], page_pos[i, unused] = -1, -1
    if shuffle:
        order = np.stack([rng.permutation(p) for _ in range(b)])
        table = np.take_along_axis(table, order[:, None], 2)
        page_pos = np.take_along_axis(page_pos, order, 1)
    mask = None if not masked else rng.random((b, p, PAGE)) >= masked
    q = rng.standard_normal((b, num_queries, H, N)).astype(np.float32) * 2
    q_pos = (np.array(lengths)[:, None] - num_queries + np.arange(num_queries)).astype(np.int32)
    return fmt, values, keys, (q, q_pos, pool, table, page_pos, mask)


def check(implementation, lengths, groups=2, scale=0.3, **options):
    fmt, values, keys, (q, q_pos, pool, table, page_pos, mask) = arguments(lengths, groups, **options)
    run = jax.jit(gqa_decode, static_argnames=("format", "scale", "implementation"))
    got = run(q, q_pos, pool, table, page_pos, mask, format=fmt, scale=scale, implementation=implementation)
    for have, want in zip(got, expected(q, q_pos, values, keys, table, page_pos, mask, scale), strict=True):
        np.testing.assert_allclose(have, want, atol=2e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two pages, so that these short contexts loop."""
    monkeypatch.setattr(xla, "MAX_BLOCK_TOKENS", 2 * PAGE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_ragged_batch_with_every_edge_of_a_page(implementation, format):
    check(implementation, [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 3], format=format)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("groups", [1, 3, H])
def test_every_number_of_kv_heads_and_several_query_positions(implementation, groups):
    # The sequence of 1 token has queries before its start: positions below 0 see nothing.
    check(implementation, [1, 40, 3 * PAGE], groups, num_queries=5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_in_any_order_and_masked_tokens(implementation):
    check(implementation, [90, 33, 7], num_queries=3, shuffle=True, masked=0.4, format="bf16")
    check(implementation, [90, 33, 7], shuffle=True, masked=0.4)
    check(implementation, [40, 12], masked=1.1)


def test_parts_of_a_context_merge_into_the_whole():
    fmt, _, _, (q, q_pos, pool, table, page_pos, _) = arguments([100], 2, num_queries=2)
    run = lambda cut: gqa_decode(  # noqa: E731
        q, q_pos, pool, table[:, :, cut], page_pos[:, cut], format=fmt, scale=0.3
    )
    parts = merge_lse(run(slice(4, 7)), run(slice(0, 4)))
    for got, want in zip(parts, run(slice(None)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_work_ends_with_the_last_visible_page():
    """A page that no query can see is not read: NaN in it would poison the output through 0 * NaN."""
    fmt, _, _, (q, _, pool, table, page_pos, _) = arguments([8 * PAGE], 2)
    hidden = table[:, :, 4:].reshape(-1)
    pool = {name: part.at[hidden].set(jnp.nan) for name, part in pool.items()}
    out, lse = gqa_decode(q, jnp.array([[4 * PAGE - 1]]), pool, table, page_pos, format=fmt, scale=0.3)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_bad_arguments_are_named():
    fmt, _, _, (q, q_pos, pool, table, page_pos, _) = arguments([20], 2)
    good = {"q": q, "q_pos": q_pos, "pool": pool, "block_table": table, "page_pos": page_pos}
    for bad, message in (
        ({"q": q[..., :4]}, "q has width 4: must be the keys' 8"),
        ({"q": q[:, :, :3]}, "q has 3 heads: must be a multiple of the 2 KV heads"),
        ({"q_pos": np.zeros((2, 1), int)}, r"q_pos has shape \(2, 1\): must be \(1, 1\)"),
        ({"page_pos": np.zeros((1, 3), int)}, r"must be \(1, 2, 3\)"),
        ({"mask": np.ones((1, 2), bool)}, r"mask has shape \(1, 2\): must be \(1, 2, 16\)"),
        ({"implementation": "cuda"}, "implementation = 'cuda': must be one of reference, xla"),
        ({"format": get_format("fp8")}, "format fp8 needs"),
    ):
        with pytest.raises(ValueError, match=message):
            api.gqa_decode(**{**good, "format": fmt, "scale": 1.0, **bad})
