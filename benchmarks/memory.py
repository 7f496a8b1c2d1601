"""Memory: what decoding at a long context holds, and the bytes of each cache at 128 thousand tokens.

    python -m benchmarks.memory [--context 16384] [--format f32] [--json PATH] [--check]

First, decoding must hold the cache, one block, and nothing of the cache's size beside. A model of 106 million
parameters decodes one sequence whose cache is full to the context. RssAnon is sampled
every few milliseconds meanwhile. What the process holds beyond what it held before, the cache counted, must
stay within 1.3 x cache + one block: a second copy of the cache, or one expanded to float32, would show.

Then, the bytes of every array of a cache for 16 sequences of 131,072 tokens at DeepSeek-V3's shape (61 layers, latent
512 + rope 64): scales, tables and the hot tier included. One layer is allocated in full, all layers are evaluated as
shapes, and both must agree with the formula. They are compared with what the articles' models would keep in bfloat16:
MHA with 64 heads of 128 and GQA with 8. `mixed` must be at most 12.5 % of GQA and 1/32 of MHA.
"""

import argparse
import json
import pathlib
import sys
import threading
import time

FORMATS = ("f32", "bf16", "fp8", "int8", "fp4", "nuq4", "mixed")
SEQUENCES, CONTEXT = 16, 131_072
MHA_PER_TOKEN, GQA_PER_TOKEN = 2 * 64 * 128 * 2, 2 * 8 * 128 * 2  # bytes in one layer


def rss_anon() -> int:
    """Bytes of anonymous memory that this process has resident."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this program needs Linux")


class Peak(threading.Thread):
    """Samples `rss_anon` until `stop`."""

    def __init__(self):
        super().__init__(daemon=True)
        self.value, self._stopped = rss_anon(), threading.Event()
        self.start()

    def run(self):
        while not self._stopped.wait(0.002):
            self.value = max(self.value, rss_anon())

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return max(self.value, rss_anon())


def measure(format: str, context: int, steps: int) -> dict:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from benchmarks.peers.shapes import mla_config
    from mlaflax.cache.latent import PAGE_SIZE
    from mlaflax.decode import Engine, EngineConfig
    from mlaflax.model import init_model
    from mlaflax.ops.mla_decode.xla import pages_per_block

    config = mla_config()
    length = context + 2 * PAGE_SIZE
    engine = Engine(init_model(config), config=EngineConfig(format, max_sequences=1, max_length=length))
    cache = engine.cache.nbytes()
    pages = jnp.arange(engine.cache.block_table.size, dtype=jnp.int32)[None]
    state = dataclasses.replace(
        engine.state,
        cache=dataclasses.replace(engine.cache, block_table=pages),
        position=jnp.full((1,), context - steps, jnp.int32),
        limit=jnp.full((1,), length, jnp.int32),
        active=jnp.ones((1,), bool),
    )
    state = jax.device_put(state, engine.state.token.sharding)
    state, sampled = engine.decode_step(state)  # compiles
    jax.block_until_ready(sampled)
    before = rss_anon() - cache
    peak = Peak()
    start = time.perf_counter()
    for _ in range(steps):
        state, sampled = engine.decode_step(state)
        jax.block_until_ready(sampled)
    seconds = time.perf_counter() - start
    growth = peak.stop() - before
    attention = config.attention
    # The tiers are read one after the other, and the cold one's block is the larger.
    block_tokens = pages_per_block(1, attention.num_heads, length // PAGE_SIZE, PAGE_SIZE) * PAGE_SIZE
    block = block_tokens * (attention.kv_lora_rank + attention.qk_rope_head_dim + 2 * attention.num_heads) * 4
    return {
        "format": format,
        "context": context,
        "cache_bytes": cache,
        "block_bytes": block,
        "growth_bytes": growth,
        "ratio": (growth - block) / cache,
        "tokens_per_second": steps / seconds,
    }


def expected_bytes(config, format: str) -> int:
    """Bytes of a cache at the benchmark's size, from the formats' definitions: the formula to check arrays against."""
    c, r = config.attention.kv_lora_rank, config.attention.qk_rope_head_dim
    per_token = {
        "f32": 4 * (c + r),
        "bf16": 2 * (c + r),
        "fp8": c + 4 * -(-c // 128) + 2 * r,
        "int8": c + 2 * -(-c // 32) + 2 * r,
        "fp4": c // 2 + c // 16 + 2 * r,
        "nuq4": c // 2 + c // 16 + 2 * r,
    }
    layers, m = config.num_layers, config.mixed
    pages = -(-CONTEXT // (m.page if format == "mixed" else 128))
    table = 4 * SEQUENCES * pages
    if format != "mixed":
        return layers * SEQUENCES * CONTEXT * per_token[format] + table + 64 * layers * (format == "nuq4")
    hot_tokens = (m.window // m.page + 1 + -(-(m.sinks + m.salient) // m.page)) * m.page
    # Each salient token's index; the attention measured of each of them and of each token in the ring.
    notes = 4 * (2 * m.salient + m.window + m.page) if m.salient else 0
    hot = layers * SEQUENCES * (hot_tokens * per_token[m.hot] + notes) + 4 * SEQUENCES
    return layers * SEQUENCES * CONTEXT * per_token[m.cold] + table + hot + 64 * layers * (m.cold == "nuq4")


def cache_bytes(format: str) -> dict:
    """A cache's bytes at DeepSeek-V3's shape: allocated for one layer, evaluated for all, and by the formula."""
    import dataclasses
    import functools

    import jax

    from configs.deepseek_v3 import config
    from mlaflax.cache import LatentCache

    model = dataclasses.replace(config.model, max_length=max(CONTEXT, config.model.max_length))
    one = dataclasses.replace(
        model, num_layers=1, moe=dataclasses.replace(model.moe, first_dense=min(1, model.moe.first_dense))
    )

    def create(model):
        return LatentCache.create(model, format, num_sequences=SEQUENCES, max_length=CONTEXT)

    before = rss_anon()
    made = create(one)
    jax.block_until_ready(made)
    allocated, resident = made.nbytes(), rss_anon() - before
    del made
    shapes = jax.eval_shape(functools.partial(create, model))
    evaluated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    tokens = model.num_layers * SEQUENCES * CONTEXT
    return {
        "format": format,
        "one_layer_bytes": allocated,
        "one_layer_resident_bytes": resident,
        "bytes": evaluated,
        "formula_agrees": allocated == expected_bytes(one, format)
        and evaluated == expected_bytes(model, format),
        "bytes_per_token_and_layer": evaluated / tokens,
        "of_gqa": evaluated / (tokens * GQA_PER_TOKEN),
        "of_mha": evaluated / (tokens * MHA_PER_TOKEN),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=16_384, help="tokens in the cache when decoding ends")
    parser.add_argument("--format", choices=FORMATS, action="append", help="cache format; repeat for several")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 when the target is missed")
    args = parser.parse_args()
    results = [measure(format, args.context, args.steps) for format in args.format or ["f32", "mixed"]]
    for r in results:
        print(
            f"{r['format']:>5}: cache {r['cache_bytes'] / 1e6:8.1f} MB, block {r['block_bytes'] / 1e6:6.1f} MB, "
            f"held while decoding {r['growth_bytes'] / 1e6:8.1f} MB"
        )
    print(
        f"\n{SEQUENCES} sequences of {CONTEXT} tokens, 61 layers, latent 512 + rope 64\n"
        f"{'format':>7}  {'bytes/token/layer':>17}  {'in all':>9}  {'of GQA-8':>8}  {'of MHA-64':>9}"
        "  one layer allocated"
    )
    sizes = [cache_bytes(format) for format in FORMATS if format != "f32"]
    for s in sizes:
        print(
            f"{s['format']:>7}  {s['bytes_per_token_and_layer']:>17.1f}  {s['bytes'] / 1e9:>6.1f} GB"
            f"  {s['of_gqa']:>8.2%}  {'1/' + format(1 / s['of_mha'], '.1f'):>9}  {s['one_layer_bytes'] / 1e6:.1f} MB"
            + ("" if s["formula_agrees"] else "  DIFFERS FROM THE FORMULA")
        )
    if args.json:
        args.json.write_text(json.dumps({"decoding": results, "sizes": sizes}, indent=1))
    worst = max(r["ratio"] for r in results)
    mixed = next(s for s in sizes if s["format"] == "mixed")
    met = (
        worst <= 1.3
        and mixed["of_gqa"] <= 0.125
        and mixed["of_mha"] <= 1 / 32
        and all(s["formula_agrees"] for s in sizes)
    )
    print(
        f"Decoding at {args.context} tokens holds {worst:.2f} x cache + one block (target: at most 1.3 x); mixed keeps "
        f"{mixed['of_gqa']:.2%} of GQA-8 (target: at most 12.5 %) and 1/{1 / mixed['of_mha']:.0f} of MHA-64 "
        f"(target: at most 1/32): {'met' if met else 'missed'}."
    )
    return 1 if args.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
