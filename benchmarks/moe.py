"""Speed of the mixture of experts beside dense layers, on whatever jax runs on.

    python -m benchmarks.moe [--rounds 7] [--quick] [--json PATH] [--check]

Two questions:

* The op. `grouped_swiglu` over m rows, forward and forward + backward, against
    dense     the same SwiGLU with one set of weights: equal FLOPs, the floor
    capacity  rows gathered into [e, largest group, d], then batched products: the usual sparse form
    ragged    `jax.lax.ragged_dot` (at the smallest shape only: on CPU it costs e times dense)
  Group sizes are uneven: multinomial over Dirichlet(5) shares.
* The layer. A training step (forward + backward) of a MoE layer of 128 experts, 8 active and 1 shared,
  against a dense SwiGLU with as many parameters in total.

Contestants take turns within a round; figures are medians over rounds of ratios within a round. Targets: op at
most 1.5 times dense, forward and forward + backward, in every training shape; layer at least 3 times the
tokens per second of the dense layer.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlaflax.config import MoEConfig
from mlaflax.model.layers import SwiGLU
from mlaflax.model.moe import MoE
from mlaflax.ops.grouped_matmul import grouped_swiglu

OP_TARGET = 1.5
LAYER_TARGET = 3.0

# rows (tokens times active experts), hidden, expert width, experts.
SHAPES = [(2048, 256, 128, 16), (4096, 512, 256, 16), (16384, 512, 128, 64), (16384, 512, 512, 64)]
# Few rows per expert: bound by reading the weights, of which dense has one e-th. Reported, no target.
DECODE_SHAPES = [(8, 512, 256, 64), (64, 512, 256, 64)]


def time_rounds(contestants: dict[str, tuple[Callable, tuple]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, after one call that compiles."""
    for function, args in contestants.values():
        jax.block_until_ready(function(*args))
    seconds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (function, args) in contestants.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def dense_swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def capacity_swiglu(x, gate, up, down, sizes, capacity):
    rows = (jnp.cumsum(sizes) - sizes)[:, None] + jnp.arange(capacity)
    inside = jnp.arange(capacity) < sizes[:, None]
    grouped = jnp.where(inside[:, :, None], x[jnp.minimum(rows, len(x) - 1)], 0)
    hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", grouped, gate)) * jnp.einsum("ecd,edf->ecf", grouped, up)
    y = jnp.einsum("ecf,efd->ecd", hidden, down)
    # Rows past a group's end go to a row that is cut off.
    return jnp.zeros((len(x) + 1, x.shape[1])).at[jnp.where(inside, rows, len(x))].set(y)[: len(x)]


def with_backward(function: Callable) -> Callable:
    """The function's value and the gradients of all its arguments; the cotangent is its own value."""

    def run(*args):
        y, vjp = jax.vjp(function, *args)
        return vjp(y)

    return jax.jit(run)


def measure_op(shape: tuple[int, int, int, int], rounds: int, ragged: bool) -> dict:
    m, d, f, e = shape
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(rng.multinomial(m, rng.dirichlet(np.full(e, 5.0))), jnp.int32)
    x = jnp.asarray(rng.normal(size=(m, d)), jnp.float32)
    stacks = [jnp.asarray(rng.normal(size=s) * 0.02, jnp.float32) for s in ((e, d, f), (e, d, f), (e, f, d))]
    forms: dict[str, tuple[Callable, tuple]] = {
        "dense": (dense_swiglu, (x, *(w[0] for w in stacks))),
        "ours": (lambda *a: grouped_swiglu(*a, sizes), (x, *stacks)),
        "capacity": (partial(capacity_swiglu, sizes=sizes, capacity=int(sizes.max())), (x, *stacks)),
    }
    if ragged:
        forms["ragged"] = (lambda *a: grouped_swiglu(*a, sizes, implementation="ragged_dot"), (x, *stacks))
    figures: dict = {"rows": m, "hidden": d, "expert_size": f, "experts": e}
    for phase, wrap in (("forward", jax.jit), ("training", with_backward)):
        seconds = time_rounds({name: (wrap(g), a) for name, (g, a) in forms.items()}, rounds)
        flops = 6 * m * d * f * (1 if phase == "forward" else 3)
        figures[phase] = {
            "dense_gflops": flops / statistics.median(seconds["dense"]) / 1e9,
            "seconds": {name: statistics.median(s) for name, s in seconds.items()},
            "over_dense": {n: median_ratio(s, seconds["dense"]) for n, s in seconds.items() if n != "dense"},
        }
    return figures


def measure_layer(rounds: int, tokens: int = 2048, hidden: int = 512) -> dict:
    config = MoEConfig(num_experts=128, top_k=8, expert_size=128, num_shared_experts=1)
    make = {"dtype": jnp.dtype(jnp.float32), "init_std": 0.02}
    moe = MoE(hidden, config, **make, rngs=nnx.Rngs(0))
    width = (config.num_experts + config.num_shared_experts) * config.expert_size
    dense = SwiGLU(hidden, width, **make, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, tokens, hidden))
    valid = jnp.ones((1, tokens), bool)

    def step(layer, *args):
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def run(params, x):
            y = nnx.merge(graph, params, rest)(x, *args)
            return y[0] if args else y

        return with_backward(run), (params, x)

    seconds = time_rounds({"moe": step(moe, valid), "dense": step(dense)}, rounds)
    count = {
        name: sum(p.size for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))
        for name, layer in (("moe", moe), ("dense", dense))
    }
    return {
        "parameters": count,
        "tokens_per_second": {name: tokens / statistics.median(s) for name, s in seconds.items()},
        "speedup": median_ratio(seconds["dense"], seconds["moe"]),
    }


def report(figures: dict) -> None:
    shape = (
        f"{figures['rows']} x {figures['hidden']} x {figures['expert_size']}, {figures['experts']} experts"
    )
    for phase in ("forward", "training"):
        p = figures[phase]
        ratios = "  ".join(f"{name} {r:.2f}x" for name, r in p["over_dense"].items())
        print(
            f"{shape:36} {phase:9} dense {1e3 * p['seconds']['dense']:8.2f} ms "
            f"{p['dense_gflops']:6.0f} GFLOP/s   {ratios}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds per shape (default 7)")
    parser.add_argument(
        "--quick", action="store_true", help="the first two training shapes, and no decode shapes"
    )
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be at least 1")

    print(
        f"{jax.default_backend()}, float32; time over dense of equal FLOPs, median of {arguments.rounds} rounds"
    )
    ops, decode = [], []
    for i, shape in enumerate(SHAPES[:2] if arguments.quick else SHAPES):
        ops.append(measure_op(shape, arguments.rounds, ragged=i == 0))
        report(ops[-1])
    for shape in () if arguments.quick else DECODE_SHAPES:
        decode.append(measure_op(shape, arguments.rounds, ragged=False))
        report(decode[-1])
    layer = measure_layer(arguments.rounds)
    for name, rate in layer["tokens_per_second"].items():
        print(
            f"layer {name:6} {layer['parameters'][name] / 1e6:6.1f} M parameters {rate:9.0f} tokens/s training"
        )

    worst = {phase: max(o[phase]["over_dense"]["ours"] for o in ops) for phase in ("forward", "training")}
    met = max(worst.values()) <= OP_TARGET and layer["speedup"] >= LAYER_TARGET
    if arguments.json:
        results = {"op": ops, "decode": decode, "layer": layer, "worst_over_dense": worst, "met": met}
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    print(
        f"{'Met' if met else 'MISSED'}: grouped experts take at most {worst['forward']:.2f}x (forward) and "
        f"{worst['training']:.2f}x (training) the time of a dense product of equal FLOPs (target {OP_TARGET}x), and "
        f"the MoE layer trains {layer['speedup']:.1f}x as many tokens per second as a dense layer of equal total "
        f"parameters (target {LAYER_TARGET:.0f}x)."
    )
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())
