"""Training speed beside transformers' DeepseekV3 on torch, on this machine's CPU.

    python -m benchmarks.train [--config demo] [--rounds 5] [--json PATH] [--check]

The model, batch, sequence length and optimiser are those of `configs/CONFIG.py`. Both run whole steps:
forward, cross-entropy, backward, clipping, AdamW; ours also balances its experts. transformers is run with two
of its ways to compute experts, and the faster one is the one to beat.

A training worker's `setup` takes

    threads     cores it may use (its process is already limited to as many)
    config      name of the configuration
    dtype       `f32` or `bf16`
    batch       sequences
    length      tokens in each
    model       the model as fields of transformers' DeepseekV3Config
    optimizer   the fields of `OptimizerConfig`

runs at least one step, so that everything is compiled, and returns `parameters` (int) and `loss` (of the
first step; near ln(vocabulary) when the model is sound). `step(n)` runs n optimiser steps and returns n wall
times.
"""

import argparse
import dataclasses
import statistics
import sys

from benchmarks.peers import compare, shapes
from benchmarks.peers.compare import Contestant, Turns
from benchmarks.peers.protocol import Peer
from train.cli import load_config
from train.flops import training_flops

OURS = "mlaflax"
# Not `batched_mm`: it gathers the expert matrices of every token, gigabytes per layer at these batches.
EXPERTS = ("eager", "grouped_mm")
TARGET = 1.5


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="demo", help="of configs/")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument(
        "--experts", type=lambda t: t.split(","), default=list(EXPERTS), help="transformers' ways"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=5.0, help="time per worker and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds one request to a worker may take"
    )
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument("--check", action="store_true", help=f"exit 1 below {TARGET:g}x")
    arguments = parser.parse_args(argv)

    config = load_config(arguments.config)
    batch, length = config.data.batch_size, config.data.sequence_length
    workload = {
        "config": arguments.config,
        "dtype": arguments.dtype,
        "batch": batch,
        "length": length,
        "model": shapes.deepseek_v3(config.model),
        "optimizer": dataclasses.asdict(config.optimizer),
    }
    facts = compare.machine_facts(arguments.threads)
    print(f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores, load {facts['load']:.1f} at start")
    print(f"{arguments.config}: batch {batch} x {length} tokens, {arguments.dtype}")

    def contestant(name, python, module, *flags):
        log = "-".join(["train", name, *flags])
        peer = Peer(log, python, f"benchmarks.peers.{module}", flags, arguments.threads, arguments.timeout)
        return Contestant(name, flags[0] if flags else arguments.dtype, peer, workload)

    torch_python = compare.environment_python("MLAFLAX_PEERS_VENV", ".peers-venv")
    ours = contestant(OURS, sys.executable, "mlaflax_train")
    peers = [contestant("transformers", torch_python, "transformers_train", e) for e in arguments.experts]
    machine = Peer("machine", sys.executable, "benchmarks.peers.machine", threads=arguments.threads)
    rates: list[float] = []
    try:
        turns = Turns(arguments.rounds, arguments.turn_seconds, max_steps=10, threads=arguments.threads)
        compare.run([ours, *peers], turns, lambda: rates.append(machine.measure()["flops_per_second"]))
    finally:
        for peer in [machine, ours.peer, *(c.peer for c in peers)]:
            peer.quit()

    tokens = batch * length
    flops = tokens * training_flops(config.model, length)
    rows, shown = [], []
    for c in [ours, *peers]:
        row = {"peer": c.name, "variant": c.dtype, "seconds": c.rounds, "error": c.error, **c.info}
        if c.rounds:
            row["tokens_per_second"] = tokens / c.seconds
            row["floor_ratio"] = statistics.median(
                s * r / flops for s, r in zip(c.rounds, rates, strict=True)
            )
        if c is not ours and c.rounds and ours.rounds:
            row["ratios"] = compare.ratios(ours.rounds, c.rounds)
        rows.append(row)
        ratios = row.get("ratios")
        shown.append(
            [
                c.name,
                c.dtype,
                f"{row['tokens_per_second']:.0f}" if c.rounds else "-",
                f"{row['floor_ratio']:.2f}" if c.rounds else "-",
                f"{row['loss']:.3f}" if c.info else "-",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                f"{min(ratios):.2f}..{max(ratios):.2f}" if ratios else "",
            ]
        )
    rate = statistics.median(rates)
    print(f"\n{flops / tokens / 1e6:.1f} MFLOP per token, machine {rate / 1e9:.0f} GFLOP/s in f32")
    header = ["peer", "variant", "tokens/s", "x floor time", "first loss", "ours/peer", "over rounds"]
    print(compare.table(header, shown), end="\n\n")
    for row in rows:
        if row["error"]:
            print(f"no figure for {row['peer']} {row['variant']}: {row['error']}")

    result = {
        "benchmark": "train",
        "config": arguments.config,
        "machine": facts | {"flops_per_second": rate},
        "rows": rows,
        "target": TARGET,
    }
    best = min(
        (row for row in rows if "ratios" in row),
        key=lambda row: statistics.median(row["ratios"]),
        default=None,
    )
    if best is None:
        summary, met = f"Train: no figure (target {TARGET:g}x transformers): missed.", False
    else:
        ratio = statistics.median(best["ratios"])
        met = ratio >= TARGET
        summary = (
            f"Train: {rows[0]['tokens_per_second']:.0f} tokens/s, {ratio:.2f}x transformers DeepseekV3 "
            f"({best['variant']} experts) at {best['tokens_per_second']:.0f} tokens/s "
            f"(target {TARGET:g}x): {'met' if met else 'missed'}."
        )
    return compare.finish(result, summary, met, arguments.json, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
