"""Anonymous memory of decoding at a long context: the cache, one block, and nothing of the cache's size beside.

    python -m benchmarks.memory [--context 16384] [--format f32] [--json PATH] [--check]

A model of 106 million parameters decodes one sequence whose cache is full to the context. RssAnon is sampled
every few milliseconds meanwhile. What the process holds beyond what it held before, the cache counted, must
stay within 1.3 x cache + one block: a second copy of the cache, or one expanded to float32, would show.
"""

import argparse
import json
import pathlib
import sys
import threading
import time

FORMATS = ("f32", "bf16", "fp8", "int8", "fp4", "nuq4")


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
    results = [measure(format, args.context, args.steps) for format in args.format or ["f32"]]
    for r in results:
        print(
            f"{r['format']:>5}: cache {r['cache_bytes'] / 1e6:8.1f} MB, block {r['block_bytes'] / 1e6:6.1f} MB, "
            f"held while decoding {r['growth_bytes'] / 1e6:8.1f} MB"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    worst = max(r["ratio"] for r in results)
    print(f"Decoding at {args.context} tokens holds {worst:.2f} x cache + one block (target: at most 1.3 x).")
    return 1 if args.check and worst > 1.3 else 0


if __name__ == "__main__":
    sys.exit(main())
