"""Anonymous memory of decoding at a long context: the cache, one block, and nothing of the cache's size beside.

    python -m benchmarks.memory [--context 16384] [--format f32] [--json PATH] [--check]

A model of 106 million parameters decodes one sequence whose cache is full to the context. RssAnon is sampled
every few milliseconds while it runs. What the process holds beyond the weights, the compiled programs and its
other baggage, all measured before with an engine of one page, must stay within 1.3 x cache + one block: a
second copy of the cache, or one expanded to float32, would show.
"""

import argparse
import json
import pathlib
import sys
import threading
import time

FORMATS = ("f32", "bf16", "fp8")


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
    import numpy as np

    from benchmarks.peers.shapes import mla_config
    from mlaflax.cache.latent import PAGE_SIZE
    from mlaflax.decode import Engine, EngineConfig, SamplingParams
    from mlaflax.model import init_model
    from mlaflax.ops.mla_decode.xla import pages_per_block

    config = mla_config()
    model = init_model(config).unstacked()
    length = context + 2 * PAGE_SIZE
    sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    # Weights, runtime and a compiled program of the same kind are in place before the baseline is taken.
    small = Engine(model, config=EngineConfig(format, max_sequences=1, max_length=PAGE_SIZE))
    small.generate([[1, 2, 3]], sampling)
    del small
    engine = Engine(
        model, config=EngineConfig(format, max_sequences=1, max_length=length, prefill_chunks=(256,))
    )
    engine.warm_up()
    cache = engine.cache.nbytes()
    before = rss_anon() - cache
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, context - steps).tolist()
    stream = engine.stream([prompt], sampling)
    next(stream)  # prefill
    peak = Peak()
    start = time.perf_counter()
    tokens = sum(1 for _ in stream)
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
        "tokens_per_second": tokens / seconds,
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
