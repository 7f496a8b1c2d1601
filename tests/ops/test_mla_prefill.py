"""Every implementation of `mla_prefill` against a float64 loop in NumPy, and against the absorbed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.formats import GAUSSIAN_CODEBOOK, get_format
from mlaflax.ops.mla_decode import mla_decode
from mlaflax.ops.mla_prefill import is_cheaper, mla_prefill, xla

PAGE, C, R, N, V, H = 16, 32, 8, 12, 10, 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two pages, so that these short contexts loop."""
    monkeypatch.setattr(xla, "BLOCK_TOKENS", 2 * PAGE)


def case(format: str, lengths, num_queries: int, seed=0):
    """Sequences of these lengths whose last `num_queries` tokens ask, pages in any order; and each token's values."""
    rng = np.random.default_rng(seed)
    b, p = len(lengths), max(1, -(-max(lengths) // PAGE))
    fmt = get_format(*format.split("/"))
    tokens = jnp.asarray(rng.standard_normal((b * p, PAGE, C + R)), jnp.float32)
    codebook = {"codebook": jnp.asarray(GAUSSIAN_CODEBOOK)} if fmt.codebook else {}
    packed = jax.jit(fmt.pack)(tokens[..., :C], tokens[..., C:], *codebook.values())
    values = np.concatenate([fmt.unpack_latent({**packed, **codebook}), fmt.unpack_rope(packed)], -1)
    pool = {name: part if name == "latent" else jnp.swapaxes(part, 1, 2) for name, part in packed.items()}
    pool |= codebook
    table = rng.permutation(b * p).reshape(b, p).astype(np.int32)
    page_pos = np.tile(np.arange(p, dtype=np.int32) * PAGE, (b, 1))
    for i, n in enumerate(lengths):
        unused = page_pos[i] >= n
        table[i, unused], page_pos[i, unused] = -1, -1
    order = np.stack([rng.permutation(p) for _ in range(b)])
    table, page_pos = np.take_along_axis(table, order, 1), np.take_along_axis(page_pos, order, 1)
    q = (rng.standard_normal((b, num_queries, H, N + R)) * 2).astype(np.float32)
    q_pos = (np.array(lengths)[:, None] - num_queries + np.arange(num_queries)).astype(np.int32)
    k_up, v_up = (rng.standard_normal((H, width, C)).astype(np.float32) / 4 for width in (N, V))
    return (q, q_pos, k_up, v_up, pool, table, page_pos), {"format": fmt, "scale": 0.3}, values


def by_hand(q, q_pos, k_up, v_up, table, page_pos, values, scale):
    q, k_up, v_up, values = (np.asarray(x, np.float64) for x in (q, k_up, v_up, values))
    out, lse = np.zeros((*q.shape[:3], V)), np.full(q.shape[:3], -np.inf)
    for i, j, h in np.ndindex(*q.shape[:3]):
        seen = np.array(
            [
                values[table[i, p], t]
                for p in range(table.shape[1])
                for t in range(PAGE)
                if page_pos[i, p] >= 0 and page_pos[i, p] + t <= q_pos[i, j]
            ]
        )
        if not len(seen):
            continue
        keys = np.concatenate([seen[:, :C] @ k_up[h].T, seen[:, C:]], axis=1)
        scores = keys @ q[i, j, h] * scale
        weights = np.exp(scores - scores.max())
        out[i, j, h] = weights @ (seen[:, :C] @ v_up[h].T) / weights.sum()
        lse[i, j, h] = scores.max() + np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("format", ["f32", "bf16", "fp8", "int8", "fp4/fp8", "nuq4"])
def test_ragged_batch_of_chunks(implementation, format):
    # Sequences shorter than the chunk have queries before their start, which see nothing.
    args, options, values = case(format, [0, 1, 7, PAGE, 3 * PAGE + 1, 5 * PAGE - 3], num_queries=9)
    out, lse = jax.jit(lambda *a: mla_prefill(*a, **options, implementation=implementation))(*args)
    q, q_pos, k_up, v_up, _, table, page_pos = args
    want_out, want_lse = by_hand(q, q_pos, k_up, v_up, table, page_pos, values, options["scale"])
    np.testing.assert_allclose(out, want_out, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5, rtol=1e-5)


def test_equals_the_absorbed_form():
    args, options, _ = case("fp8", [70, 33], num_queries=20)
    q, q_pos, k_up, v_up, *where = args
    out, lse = mla_prefill(*args, **options)
    absorbed = np.concatenate([np.einsum("bqhn,hnc->bqhc", q[..., :N], k_up), q[..., N:]], -1)
    latent, want_lse = mla_decode(jnp.asarray(absorbed), q_pos, *where, **options)
    np.testing.assert_allclose(out, np.einsum("bqhc,hvc->bqhv", latent, v_up), atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


def test_work_ends_with_the_last_visible_page():
    """A page that no query can see is not read: NaN in it would poison the output through 0 * NaN."""
    args, options, _ = case("f32", [8 * PAGE], num_queries=4)
    q, _, k_up, v_up, pool, _, _ = args
    pool = {name: part.at[4:].set(jnp.nan) for name, part in pool.items()}
    table, page_pos = jnp.arange(8)[None], (jnp.arange(8) * PAGE)[None]
    q_pos = 4 * PAGE - 4 + jnp.arange(4)[None]
    out, lse = mla_prefill(q, q_pos, k_up, v_up, pool, table, page_pos, **options)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize(
    ("dims", "least"),
    [
        # By hand: q (2c + r) > q (n + r + v) + c (n + v).
        ((256, 64, 32, 64), 86),  # q (544 - 160) > 32768
        ((512, 128, 64, 128), 171),  # q (1088 - 320) > 131072
    ],
)
def test_the_form_with_fewer_operations_is_known(dims, least):
    assert not is_cheaper(1, *dims)
    assert not is_cheaper(least - 1, *dims)
    assert is_cheaper(least, *dims)


def test_bad_arguments_are_named():
    args, options, _ = case("f32", [40], num_queries=2)
    names = ("q", "q_pos", "k_up", "v_up", "pool", "block_table", "page_pos")
    good = dict(zip(names, args, strict=True))
    for bad, message in (
        ({"q": args[0][..., 1:]}, r"k_up has shape \(3, 12, 32\): must be \(3, 11, 32\)"),
        ({"v_up": args[3][1:]}, r"v_up has shape \(2, 10, 32\): must be \(3, 10, 32\)"),
        ({"q_pos": args[1][:, 1:]}, r"q_pos has shape \(1, 1\): must be \(1, 2\)"),
        ({"page_pos": args[6][:, 1:]}, r"page_pos has shape"),
        ({"implementation": "cuda"}, "implementation = 'cuda': must be one of reference, xla"),
        ({"format": get_format("fp8")}, "format fp8 needs"),
    ):
        with pytest.raises(ValueError, match=message):
            mla_prefill(**{**good, **options, **bad})
