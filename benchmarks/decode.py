"""Decode speed beside other implementations, on this machine's CPU.

    python -m benchmarks.decode [--peers a,b] [--contexts 1024,4096] [--batches 1,8] [--json PATH] [--check]

Models of 106.3 million parameters, 12 layers: MLA (latent 256 + rope 32, 12 heads, dense MLPs), with the same
weights in ours, transformers and llama.cpp, and GQA (4 KV heads of 64). Caches are filled up to the context
without being computed, then single tokens are decoded: one step is the model, its head and the arg max, for
every sequence of the batch. Peers' environments come from `benchmarks/peers/setup.sh`.

A decode worker's `setup` takes

    threads   cores it may use (its process is already limited to as many)
    context   tokens in the cache of each sequence before the first step; values random or repeated
    batch     sequences, all of the same length
    dtype     `f32`, `bf16`, or the peer's own names (llama.cpp: `f16`, `f16+q8_0`, ...): weights and cache
    room      steps the cache must have room for
    weights   folder with config.json and model.safetensors of the MLA model (float32)

runs at least one step, so that everything is compiled, and returns `parameters` (int) and `cache_bytes` (int,
of the filled cache). `step(n)` feeds each sequence its own last arg max, n times; it returns n wall times.

The floor of a step is the larger of its bytes over the machine's read bandwidth and its FLOPs over the
machine's float32 matrix rate, both measured in the same rounds.
"""

import argparse
import copy
import dataclasses
import statistics
import sys

from benchmarks.peers import compare, hf_weights, shapes
from benchmarks.peers.compare import Contestant, Turns, say
from benchmarks.peers.protocol import CACHE, Peer

OURS = "mlaflax"
GQA_PER_TOKEN = 2 * shapes.GQA["num_key_value_heads"] * shapes.GQA["head_dim"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A peer: its worker, the environment it runs in and the dtypes it is run with."""

    module: str
    argument: str
    environment: str
    dtypes: tuple[str, ...]
    # Numbers in the cache per token and layer: the latent and the rope key, or keys and values.
    per_token: int = 256 + 32
    # Memory of a step beyond the cache, in caches: transformers concatenates, and expands the latent.
    overhead: float = 1.0


ENTRIES = {
    OURS: Entry("mlaflax_worker", "", "", ("f32", "bf16")),
    "transformers-mla": Entry("transformers_decode", "mla", "torch", ("f32", "bf16"), overhead=3.0),
    "transformers-absorbed": Entry("transformers_decode", "absorbed", "torch", ("f32", "bf16")),
    "transformers-gqa": Entry("transformers_decode", "gqa", "torch", ("f32", "bf16"), GQA_PER_TOKEN),
    "llama.cpp-mla": Entry("llama_cpp_decode", "mla", "torch", ("f32", "f16", "f16/fa", "f16+q8_0/fa")),
    "llama.cpp-gqa": Entry("llama_cpp_decode", "gqa", "torch", ("f16/fa",), GQA_PER_TOKEN),
    "easydel-mla": Entry("easydel_decode", "", "jax", ("f32", "bf16"), 12 * (64 + 32 + 64)),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Ours must be `factor` times as fast as `peer` at `context`, at every batch that is run.

    `best` compares our fastest dtype with the peer's fastest; otherwise each dtype of the peer is compared
    with ours of the same width. `strict` wants more than the factor, not as much.
    """

    peer: str
    context: int
    factor: float
    best: bool = False
    strict: bool = False

    def met(self, ratio: float) -> bool:
        return ratio > self.factor if self.strict else ratio >= self.factor

    def __str__(self) -> str:
        return f"{'>' if self.strict else ''}{self.factor:g}x {self.peer} at {self.context}"


TARGETS = [
    Target("transformers-mla", 4096, 8.0),
    Target("transformers-mla", 16384, 25.0),
    Target("transformers-gqa", 4096, 1.0, strict=True),
    Target("transformers-gqa", 16384, 1.0, strict=True),
    Target("llama.cpp-mla", 4096, 1.0, best=True),
    Target("llama.cpp-mla", 16384, 1.5, best=True),
    Target("easydel-mla", 1024, 1.0, strict=True),
    Target("easydel-mla", 4096, 1.0, strict=True),
    Target("easydel-mla", 16384, 1.0, strict=True),
]


def make_contestants(names: list[str], arguments: argparse.Namespace) -> dict[str, list[Contestant]]:
    """One worker process per peer and dtype, by peer."""
    pythons = {
        "": sys.executable,
        "torch": compare.environment_python("MLAFLAX_PEERS_VENV", ".peers-venv"),
        "jax": compare.environment_python("MLAFLAX_PEERS_JAX_VENV", ".peers-jax-venv"),
    }
    made = {}
    for name in names:
        entry = ENTRIES[name]
        dtypes = [d for d in entry.dtypes if not arguments.dtypes or d in arguments.dtypes]
        made[name] = [
            Contestant(
                name,
                dtype,
                Peer(
                    f"{name}-{dtype.replace('/', '-')}",
                    pythons[entry.environment],
                    f"benchmarks.peers.{entry.module}",
                    [entry.argument] if entry.argument else [],
                    arguments.threads,
                    arguments.timeout,
                ),
                setup={},
            )
            for dtype in dtypes
        ]
    return made


def need_bytes(contestant: Contestant, context: int, batch: int) -> int:
    """Rough memory of a workload: weights and runtime, the cache, and what the peer adds to it."""
    entry = ENTRIES[contestant.name]
    cache = batch * context * 12 * entry.per_token * contestant.width
    return int(106.3e6 * contestant.width + 0.4e9 + cache * (1 + entry.overhead))


def run_cell(
    contestants: dict[str, list[Contestant]], context: int, batch: int, arguments, machine: Peer
) -> dict:
    """Run every contestant at one context and batch; returns the cell of the JSON result."""
    turns = Turns(arguments.rounds, arguments.turn_seconds, arguments.max_steps, arguments.threads)
    workload = {"context": context, "batch": batch, "room": turns.room, "weights": str(CACHE / "mla")}
    for c in (c for peers in contestants.values() for c in peers):
        c.setup = workload | {"dtype": c.dtype}
        c.need_bytes = need_bytes(c, context, batch)
        c.error = None
        c.rounds.clear()
        c.info = {}
    ours = contestants.get(OURS, [])
    peers = [c for name, group in contestants.items() if name != OURS for c in group]
    rows, rates = [], []
    our_rounds: dict[str, list[float]] = {c.dtype: [] for c in ours}
    our_floors: dict[str, list[float]] = {c.dtype: [] for c in ours}
    budget = int(0.8 * compare.available_bytes())
    base = sum(c.need_bytes for c in ours)
    for c in peers:
        if base + c.need_bytes > budget:
            c.error = f"needs about {c.need_bytes / 1e9:.0f} GB of memory beside ours"
            rows.append(row_of(c, batch, [], []))
    for group in compare.in_groups(ours, [c for c in peers if not c.error], budget):
        say(
            f"  context {context}, batch {batch}: {', '.join(f'{c.name} {c.dtype}' for c in [*ours, *group])}"
        )
        before = len(rates)
        compare.run([*ours, *group], turns, lambda: rates.append(machine.measure()))
        floors = {
            width: [step_floor(context, batch, width, rate) for rate in rates[before:]] for width in (4, 2)
        }
        working = [c for c in ours if not c.error]
        best = min(working, key=lambda c: c.seconds, default=None)
        for c in working:
            our_rounds[c.dtype] += c.rounds
            our_floors[c.dtype] += floors[c.width]
        for c in group:
            row = row_of(c, batch, c.rounds, floors[c.width])
            same = next((o for o in working if o.width == c.width), None)
            if c.rounds and same:
                row["ratios"] = compare.ratios(same.rounds, c.rounds)
            if c.rounds and best:
                row["ratios_best"] = compare.ratios(best.rounds, c.rounds)
            rows.append(row)
    our_rows = [row_of(c, batch, our_rounds[c.dtype], our_floors[c.dtype]) for c in ours]
    return {
        "context": context,
        "batch": batch,
        "bytes_per_second": statistics.median(r["bytes_per_second"] for r in rates),
        "flops_per_second": statistics.median(r["flops_per_second"] for r in rates),
        "floor_tokens_per_second": {
            name: batch / statistics.median(step_floor(context, batch, width, r) for r in rates)
            for name, width in (("f32", 4), ("16 bit", 2))
        },
        "rows": our_rows + rows,
    }


def step_floor(context: int, batch: int, width: int, rate: dict) -> float:
    """Seconds no MLA step can beat at these rates."""
    moved, flops = shapes.decode_floor(shapes.deepseek_v3(shapes.mla_config()), context, batch, width)
    return max(moved / rate["bytes_per_second"], flops / rate["flops_per_second"])


def row_of(c: Contestant, batch: int, rounds: list[float], floors: list[float]) -> dict:
    row = {"peer": c.name, "dtype": c.dtype, "seconds": list(rounds), "error": c.error, **c.info}
    if rounds:
        row["tokens_per_second"] = batch / statistics.median(rounds)
        if "gqa" not in c.name:
            row["floor_ratio"] = statistics.median(s / f for s, f in zip(rounds, floors, strict=True))
    return row


def print_cell(cell: dict) -> None:
    floor = cell["floor_tokens_per_second"]
    print(
        f"\ncontext {cell['context']}, batch {cell['batch']}: floor {floor['f32']:.0f} tokens/s f32, "
        f"{floor['16 bit']:.0f} 16 bit ({cell['bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{cell['flops_per_second'] / 1e9:.0f} GFLOP/s)"
    )
    rows = []
    for row in cell["rows"]:
        ratios = row.get("ratios")
        rows.append(
            [
                row["peer"],
                row["dtype"],
                f"{row['tokens_per_second']:.1f}" if row["seconds"] else "-",
                f"{row['floor_ratio']:.2f}" if "floor_ratio" in row else "",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                f"{min(ratios):.2f}..{max(ratios):.2f}" if ratios else "",
            ]
        )
    print(compare.table(["peer", "dtype", "tokens/s", "x floor time", "ours/peer", "over rounds"], rows))
    for row in cell["rows"]:
        if row["error"]:
            print(f"  no figure for {row['peer']} {row['dtype']}: {row['error']}")


def judge(target: Target, cells: list[dict], names: list[str]) -> dict | None:
    """The worst ratio of a target over batches (and dtypes); None when the run did not cover it."""
    cells = [cell for cell in cells if cell["context"] == target.context]
    if not cells or target.peer not in names or OURS not in names:
        return None
    measured = []
    for cell in cells:
        rows = [row for row in cell["rows"] if row["peer"] == target.peer]
        if target.best:
            rows = [row for row in rows if "ratios_best" in row]
            rows = sorted(rows, key=lambda row: -row["tokens_per_second"])[:1]
            found = [statistics.median(row["ratios_best"]) for row in rows]
        else:
            found = [statistics.median(row["ratios"]) for row in rows if "ratios" in row]
        # A peer that has no figure at all leaves the target open, and an open target is not met.
        measured.append(min(found) if found else None)
    worst = None if None in measured else min(measured)
    return {"target": str(target), "ratio": worst, "met": worst is not None and target.met(worst)}


def summarise(judged: list[dict]) -> str:
    if not judged:
        return "Decode: no target was covered by this run."
    parts = [
        f"{'no figure' if j['ratio'] is None else format(j['ratio'], '.2f') + 'x'} (target {j['target']})"
        for j in judged
    ]
    missed = sum(not j["met"] for j in judged)
    verdict = "all targets met" if not missed else f"{missed} of {len(judged)} targets missed"
    return f"Decode, worst batch and dtype: {', '.join(parts)}: {verdict}."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text):
        unknown = set(text.split(",")) - set(ENTRIES)
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown peer {', '.join(unknown)}; known: {', '.join(ENTRIES)}"
            )
        return text.split(",")

    def numbers(text):
        return [int(x) for x in text.split(",")]

    parser.add_argument("--peers", type=names, default=list(ENTRIES), help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument(
        "--dtypes", type=lambda t: t.split(","), help="only these (default: all of each peer)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=1.0, help="time per peer and round")
    parser.add_argument("--max-steps", type=int, default=12, help="steps per peer and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds one request to a worker may take"
    )
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if not (CACHE / "mla" / "config.json").exists():
        say("writing the MLA model's weights")
        hf_weights.write(shapes.mla_config(), CACHE / "mla")
    facts = compare.machine_facts(arguments.threads)
    print(f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores, load {facts['load']:.1f} at start")
    contestants = make_contestants(arguments.peers, arguments)
    machine = Peer("machine", sys.executable, "benchmarks.peers.machine", threads=arguments.threads)
    result = {"benchmark": "decode", "machine": facts, "cells": [], "targets": []}
    try:
        for context in arguments.contexts:
            for batch in arguments.batches:
                cell = run_cell(contestants, context, batch, arguments, machine)
                result["cells"].append(copy.deepcopy(cell))
                print_cell(cell)
    finally:
        for peer in [machine, *(c.peer for group in contestants.values() for c in group)]:
            peer.quit()
    result["targets"] = [
        j for target in TARGETS if (j := judge(target, result["cells"], arguments.peers)) is not None
    ]
    met = bool(result["targets"]) and all(j["met"] for j in result["targets"])
    print()
    return compare.finish(result, summarise(result["targets"]), met, arguments.json, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
