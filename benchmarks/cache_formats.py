"""Decode speed of every cache format at long contexts, beside llama.cpp with its quantised caches.

    python -m benchmarks.cache_formats [--contexts 16384,65536] [--formats mixed,f32,bf16] [--json PATH] [--check]

One sequence of the model of `benchmarks.decode` (106 million parameters, MLA, latent 256 + rope 32), its cache filled
without being computed. Ours keeps float32 weights, llama.cpp float16 ones. For each of ours: tokens/s, the bytes
that one step must read (weights and packed cache, hot tier and tables included), the time that takes at this
machine's read bandwidth, and the time of its float32 operations at the machine's rate; the larger is the floor.

Targets: mixed at least as fast as bf16 of the same engine, and twice as fast as llama.cpp with a q4_0 cache.
"""

import argparse
import statistics
import sys

from benchmarks.peers import compare, hf_weights, shapes
from benchmarks.peers.compare import Contestant, Turns, say
from benchmarks.peers.protocol import CACHE, Peer

FORMATS = ("f32", "bf16", "int8", "fp8", "fp4", "nuq4", "mixed")
LLAMA = ("f16+q8_0/fa", "f16+q4_0/fa")
TARGETS = (("bf16", 1.0), ("f16+q4_0/fa", 2.0))


def contestants(formats: list[str], arguments: argparse.Namespace) -> list[Contestant]:
    made = []
    torch = compare.environment_python("MLAFLAX_PEERS_VENV", ".peers-venv")
    for name in formats:
        peer = Peer(
            f"mlaflax-{name}", sys.executable, "benchmarks.peers.mlaflax_worker", [], arguments.threads, 900.0
        )
        made.append(Contestant("mlaflax", name, peer, {}))
    for name in () if arguments.alone else LLAMA:
        label = name.replace("/", "-")
        peer = Peer(
            f"llama-{label}", torch, "benchmarks.peers.llama_cpp_decode", ["mla"], arguments.threads, 900.0
        )
        made.append(Contestant("llama.cpp", name, peer, {}))
    return made


def floor(cache_bytes: int, context: int, rate: dict) -> float:
    """Seconds no step of ours can beat at these rates: float32 weights and the packed cache, all read once."""
    hf = shapes.deepseek_v3(shapes.mla_config())
    _, flops = shapes.decode_floor(hf, context, 1, 4)
    moved = 4 * shapes.step_parameters(hf) + cache_bytes
    return max(moved / rate["bytes_per_second"], flops / rate["flops_per_second"])


def run_context(context: int, arguments: argparse.Namespace, machine: Peer) -> dict:
    turns = Turns(arguments.rounds, 1.0, 12, arguments.threads)
    all_of_them = contestants(arguments.formats, arguments)
    for c in all_of_them:
        c.setup = {
            "context": context, "batch": 1, "room": turns.room, "weights": str(CACHE / "mla"), "dtype": c.dtype,
        }  # fmt: skip
    rates: list[dict] = []
    say(f"  context {context}")
    try:
        compare.run(all_of_them, turns, lambda: rates.append(machine.measure()))
    finally:
        for c in all_of_them:
            c.peer.quit()
    by_name = {c.dtype: c for c in all_of_them}
    rows = []
    for c in all_of_them:
        row = {"peer": c.name, "dtype": c.dtype, "error": c.error, "seconds": list(c.rounds), **c.info}
        if c.rounds:
            row["tokens_per_second"] = 1 / c.seconds
            if c.name == "mlaflax":
                floors = [floor(c.info["cache_bytes"], context, rate) for rate in rates]
                row["floor_ratio"] = statistics.median(s / f for s, f in zip(c.rounds, floors, strict=True))
            row["ratios"] = {
                other.dtype: compare.ratios(c.rounds, other.rounds) for other in all_of_them if other.rounds
            }
        rows.append(row)
    judged = []
    for against, factor in TARGETS:
        if against in by_name and "mixed" in by_name:
            mixed, other = by_name["mixed"], by_name[against]
            ratio = None
            if mixed.rounds and other.rounds:
                ratio = statistics.median(compare.ratios(mixed.rounds, other.rounds))
            judged.append({"context": context, "against": against, "factor": factor, "ratio": ratio})
    return {"context": context, "rows": rows, "judged": judged}


def show(cell: dict) -> None:
    print(f"\ncontext {cell['context']}, batch 1")
    rows = []
    for row in cell["rows"]:
        if row["error"]:
            print(f"  no figure for {row['peer']} {row['dtype']}: {row['error']}")
            continue

        def ratio(name: str, row=row) -> str:
            found = row["ratios"].get(name)
            return f"{statistics.median(found):.2f}" if found else ""

        rows.append(
            [
                row["peer"],
                row["dtype"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['cache_bytes'] / 1e6:.1f}",
                f"{row['floor_ratio']:.2f}" if "floor_ratio" in row else "",
                ratio("f32"),
                ratio("bf16"),
                ratio("f16+q4_0/fa"),
            ]
        )
    header = ["peer", "cache", "tokens/s", "cache MB", "x floor time", "/f32", "/bf16", "/llama q4_0"]
    print(compare.table(header, rows))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def formats(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(FORMATS)
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown format {', '.join(unknown)}; known: {', '.join(FORMATS)}"
            )
        return text.split(",")

    parser.add_argument("--contexts", type=lambda t: [int(x) for x in t.split(",")], default=[16_384, 65_536])
    parser.add_argument("--formats", type=formats, default=["f32", "bf16", "mixed"])
    parser.add_argument("--alone", action="store_true", help="ours only, without llama.cpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if not (CACHE / "mla" / "config.json").exists():
        say("writing the model's weights")
        hf_weights.write(shapes.mla_config(), CACHE / "mla")
    machine = Peer("machine", sys.executable, "benchmarks.peers.machine", threads=arguments.threads)
    result = {"benchmark": "cache_formats", "machine": compare.machine_facts(arguments.threads), "cells": []}
    try:
        for context in arguments.contexts:
            cell = run_context(context, arguments, machine)
            result["cells"].append(cell)
            show(cell)
    finally:
        machine.quit()
    judged = [j for cell in result["cells"] for j in cell["judged"]]
    met = bool(judged) and all(j["ratio"] is not None and j["ratio"] >= j["factor"] for j in judged)
    said = ", ".join(
        f"{'no figure' if j['ratio'] is None else format(j['ratio'], '.2f') + 'x'} {j['against']} at {j['context']} "
        f"(target {j['factor']:g}x)"
        for j in judged
    )
    print()
    summary = f"Decode with the mixed cache: {said or 'no target was covered by this run'}."
    return compare.finish(result, summary, met, arguments.json, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
