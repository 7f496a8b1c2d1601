"""The router and the mixture: against transformers' DeepSeek, a per-token numpy loop, and closed forms."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlaflax.config import MoEConfig
from mlaflax.model.moe import ExpertBias, MoE, route, update_bias

D = 16
BASE = MoEConfig(num_experts=8, top_k=3, expert_size=12, num_shared_experts=2)
GROUPED = dataclasses.replace(BASE, num_groups=4, top_groups=2)

# Layer outputs and routing of transformers 5.24.0 (DeepseekV2Moe, DeepseekV3MoE) on random weights, in our
# layouts. The V3 biases are all near -1.5: every biased score is negative.
GOLDEN = np.load(Path(__file__).with_name("moe_transformers.npz"))
GOLDEN_CONFIG = {
    "v2": MoEConfig(
        num_experts=16, top_k=3, expert_size=4, num_shared_experts=2, num_groups=4, top_groups=2,
        group_score="max", score="softmax", normalize=False, routed_scale=2.5,
    ),
    "v3": MoEConfig(
        num_experts=16, top_k=3, expert_size=4, num_shared_experts=2, num_groups=4, top_groups=2,
        group_score="top2", score="sigmoid", normalize=True, routed_scale=2.5,
    ),
}  # fmt: skip


def make(config: MoEConfig, dtype=jnp.float32, seed=0) -> MoE:
    # A large deviation spreads the router's scores.
    return MoE(D, config, dtype=dtype, init_std=0.5, rngs=nnx.Rngs(seed))


@nnx.jit
def run(moe: MoE, x, valid):
    return moe(x, valid)


def inputs(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_layer_equals_transformers(version):
    golden = {k.split(".")[1]: jnp.asarray(v) for k, v in GOLDEN.items() if k.startswith(version)}
    config = GOLDEN_CONFIG[version]
    moe = make(config)
    for name in ("router", "bias", "gate", "up", "down"):
        getattr(moe, name)[...] = golden[name]
    assert moe.shared is not None
    for name in ("gate", "up", "down"):
        getattr(moe.shared, name)[...] = golden[f"shared_{name}"]
    x = golden["x"]
    y, stats = run(moe, x, jnp.ones(x.shape[:2], bool))
    np.testing.assert_allclose(y, golden["y"], rtol=0, atol=2e-5 * abs(golden["y"]).max())

    weights, indices, _ = route(x.reshape(-1, D) @ golden["router"], golden["bias"], config)
    order, wanted = np.argsort(indices, -1), np.argsort(golden["indices"], -1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(indices), order, -1),
        np.take_along_axis(np.asarray(golden["indices"]), wanted, -1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights), order, -1),
        np.take_along_axis(np.asarray(golden["weights"]), wanted, -1),
        rtol=2e-6,
    )
    np.testing.assert_array_equal(stats.expert_load, np.bincount(golden["indices"].ravel(), minlength=16))


def numpy_route(logits, bias, c: MoEConfig):
    """One token, the definition in words: returns {expert: weight} and the scores."""
    z = np.asarray(logits, np.float64)
    scores = {
        "softmax": np.exp(z) / np.exp(z).sum(),
        "sigmoid": 1 / (1 + np.exp(-z)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(z))),
    }[c.score]
    biased = scores + np.asarray(bias, np.float64)
    size = c.num_experts // c.num_groups
    worth = []
    for g in range(c.num_groups):
        best = sorted(biased[g * size : (g + 1) * size], reverse=True)
        worth.append(best[0] if c.group_score == "max" or size == 1 else best[0] + best[1])
    groups = np.argsort(worth)[::-1][: c.top_groups]
    allowed = [x for x in range(c.num_experts) if x // size in groups]
    chosen = sorted(allowed, key=lambda x: -biased[x])[: c.top_k]
    total = sum(scores[x] for x in chosen) if c.normalize else 1
    return {x: scores[x] / total * c.routed_scale for x in chosen}, scores


def numpy_moe(moe: MoE, x, valid):
    """Every token by itself through its experts, in float64. Output, load, and the sequence loss over alpha."""
    c = moe.config
    router, bias, gate, up, down = (
        np.asarray(p[...], np.float64) for p in (moe.router, moe.bias, moe.gate, moe.up, moe.down)
    )
    y, load, losses, squares = np.zeros(x.shape), np.zeros(c.num_experts), [], []

    def swiglu(t, g, u, d):
        a = t @ g
        return (a / (1 + np.exp(-a)) * (t @ u)) @ d

    for b in range(len(x)):
        chosen_count, share = np.zeros(c.num_experts), np.zeros(c.num_experts)
        for q in range(x.shape[1]):
            token = np.asarray(x[b, q], np.float64)
            if moe.shared is not None:
                weights = (
                    np.asarray(w[...], np.float64) for w in (moe.shared.gate, moe.shared.up, moe.shared.down)
                )
                y[b, q] += swiglu(token, *weights)
            if not valid[b, q]:
                continue
            weights, scores = numpy_route(token @ router, bias, c)
            for e, weight in weights.items():
                y[b, q] += weight * swiglu(token, gate[e], up[e], down[e])
                load[e] += 1
                chosen_count[e] += 1
            share += scores / scores.sum()
            squares.append(np.log(np.exp(token @ router).sum()) ** 2)
        if t := valid[b].sum():
            losses.append((c.num_experts / (c.top_k * t) * chosen_count * share / t).sum())
    return y, load, np.mean(losses), np.mean(squares)


@pytest.mark.parametrize(
    ("base", "score", "normalize", "group_score"),
    [
        (BASE, "softmax", True, "max"),
        (BASE, "sqrt_softplus", False, "max"),
        (GROUPED, "sigmoid", True, "top2"),
        (GROUPED, "sqrt_softplus", True, "max"),
        (GROUPED, "softmax", False, "top2"),
    ],
)
def test_layer_equals_a_loop_over_tokens(base, score, normalize, group_score):
    config = dataclasses.replace(
        base, score=score, normalize=normalize, group_score=group_score,
        routed_scale=1.7, sequence_loss=0.3, z_loss=0.2,
    )  # fmt: skip
    moe = make(config)
    moe.bias[...] = 0.4 * inputs(8, seed=5) - 1
    x = inputs(3, 10, D)
    # Padding inside, at the end, and a sequence of nothing else.
    valid = np.ones((3, 10), bool)
    valid[0, 7:] = valid[1, 2:4] = valid[2] = False
    y, stats = run(moe, x, jnp.asarray(valid))
    wanted, load, sequence_loss, z = numpy_moe(moe, x, valid)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-5 * abs(wanted).max())
    np.testing.assert_array_equal(stats.expert_load, load)
    np.testing.assert_allclose(stats.sequence_loss, 0.3 * sequence_loss, rtol=1e-5)
    np.testing.assert_allclose(stats.z_loss, 0.2 * z, rtol=1e-5)


def test_losing_groups_stay_out_when_scores_are_negative():
    """With every biased score below 0, a losing group masked with 0 would win."""
    config = dataclasses.replace(GROUPED, top_groups=2, top_k=4)
    logits = jnp.asarray([[3.0, 3, 2, 2, -3, -3, -3, -3]])
    _, indices, _ = route(logits, jnp.full(8, -5.0), config)
    assert sorted(indices[0].tolist()) == [0, 1, 2, 3]


def test_bias_selects_but_does_not_weigh():
    config = dataclasses.replace(BASE, top_k=2, normalize=False)
    logits = jnp.asarray([[2.0, 1, 0, -1, -2, -2, -2, -2]])
    weights, indices, scores = route(logits, jnp.zeros(8).at[7].set(10.0), config)
    assert indices[0].tolist() == [7, 0]
    np.testing.assert_array_equal(weights[0], scores[0, indices[0]])


def test_gradients_reach_the_router_and_not_the_bias():
    moe = make(dataclasses.replace(GROUPED, normalize=True))
    moe.bias[...] = 0.1 * inputs(8, seed=3)
    x, valid = inputs(1, 12, D), jnp.ones((1, 12), bool)
    assert isinstance(moe.bias, ExpertBias)
    assert not isinstance(moe.bias, nnx.Param)
    graph, params, bias = nnx.split(moe, nnx.Param, ...)

    @jax.jit
    def loss(params, bias):
        y, stats = nnx.merge(graph, params, bias)(x, valid)
        return (y**2).sum() + stats.sequence_loss + stats.z_loss

    gradients, bias_gradient = jax.grad(loss, (0, 1))(params, bias)
    assert not jnp.any(bias_gradient.bias[...])

    # The router's gradient is that of the function: a central difference along a random direction. The
    # selection is constant for a step this small.
    direction = inputs(D, 8, seed=9)
    h = 1e-3

    def moved(step):
        router = params.router.replace(params.router[...] + step * direction)
        return loss(nnx.State({**params, "router": router}), bias)

    slope = float((moved(h) - moved(-h)) / (2 * h))
    assert abs(slope) > 1
    np.testing.assert_allclose(float((gradients.router[...] * direction).sum()), slope, rtol=0.02)


def test_routing_is_float32_in_a_bfloat16_layer():
    """Two experts whose scores differ by less than bfloat16 can tell: the better one gets every token."""
    config = MoEConfig(num_experts=2, top_k=1, expert_size=4, normalize=False)
    moe = make(config, jnp.bfloat16)
    row = jnp.full((D,), 0.01)
    moe.router[...] = jnp.stack([row, row * (1 + 2**-12)], axis=1)
    x = jnp.ones((1, 6, D), jnp.bfloat16)
    y, stats = run(moe, x, jnp.ones((1, 6), bool))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(stats.expert_load, [0, 6])


def test_bfloat16_layer_is_near_the_float32_layer():
    wide, narrow = make(BASE), make(BASE, jnp.bfloat16)
    x, valid = inputs(2, 9, D), jnp.ones((2, 9), bool)
    x = x.astype(jnp.bfloat16)
    wanted, got = run(wide, x.astype(jnp.float32), valid)[0], run(narrow, x, valid)[0]
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=0, atol=0.03 * abs(wanted).max())


def test_padding_changes_nothing_and_costs_nothing():
    """What is in padding reaches neither other tokens, nor statistics, nor gradients of the experts."""
    moe = make(dataclasses.replace(BASE, num_shared_experts=0, sequence_loss=0.1, z_loss=0.1))
    x = inputs(2, 6, D)
    valid = jnp.asarray([[True] * 4 + [False] * 2, [True] * 6])
    y, stats = run(moe, x, valid)
    dirty = jnp.where(valid[:, :, None], x, 1e4)
    y_dirty, stats_dirty = run(moe, dirty, valid)
    np.testing.assert_array_equal(y, y_dirty)
    np.testing.assert_array_equal(y[0, 4:], 0)
    jax.tree.map(np.testing.assert_array_equal, stats, stats_dirty)
    assert stats.expert_load.sum() == valid.sum() * 3


def test_losses_are_zero_without_coefficients():
    _, stats = run(make(BASE), inputs(1, 4, D), jnp.ones((1, 4), bool))
    assert (stats.sequence_loss, stats.z_loss) == (0, 0)


def test_sequence_loss_of_perfect_balance_is_alpha():
    """Uniform scores: f_e P_e sums to 1 whatever is selected (DeepSeek-V3, equation 17)."""
    moe = make(dataclasses.replace(BASE, sequence_loss=0.25))
    moe.router[...] = jnp.zeros((D, 8))
    _, stats = run(moe, inputs(3, 5, D), jnp.ones((3, 5), bool))
    np.testing.assert_allclose(stats.sequence_loss, 0.25, rtol=1e-6)


def test_update_bias_moves_towards_balance():
    bias = jnp.zeros((2, 4))
    load = jnp.asarray([[10.0, 0, 5, 5], [1, 1, 1, 1]])
    np.testing.assert_allclose(update_bias(bias, load, 0.1), [[-0.1, 0.1, 0, 0], [0, 0, 0, 0]], atol=1e-7)


def test_balancing_evens_out_a_skewed_router():
    """The loop that training runs, on a router that prefers two experts: the worst load falls to near the mean."""
    config = dataclasses.replace(BASE, top_k=2)
    logits = inputs(512, 8) + jnp.asarray([2.0, 1.5, 0, 0, 0, 0, -1, -1])

    def load_of(bias):
        return jnp.bincount(route(logits, bias, config)[1].ravel(), length=8).astype(jnp.float32)

    bias = jnp.zeros(8)
    before = load_of(bias).max() / load_of(bias).mean()
    bias = jax.jit(lambda b: jax.lax.fori_loop(0, 300, lambda _, b: update_bias(b, load_of(b), 0.003), b))(
        bias
    )
    after = load_of(bias).max() / load_of(bias).mean()
    assert before > 2
    assert after < 1.1
