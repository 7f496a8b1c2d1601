"""Decode worker of mlaflax: the engine's own compiled decode step, over a cache that was not computed.

python -m benchmarks.peers.mlaflax_worker

`setup`'s `dtype` is the cache's format: weights and products are float32 on CPU, where narrower ones are
slower.
"""

import dataclasses
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.peers.protocol import serve
from mlaflax import runtime
from mlaflax.convert.deepseek import load_params, model_config_from_hf, params_from_hf
from mlaflax.decode import Engine, EngineConfig
from mlaflax.model import init_model


class Worker:
    def __init__(self):
        runtime.keep_freed_memory()

    def setup(self, threads: int, context: int, batch: int, dtype: str, room: int, weights: str):
        del threads  # the process is limited to them
        folder = pathlib.Path(weights)
        config = model_config_from_hf(json.loads((folder / "config.json").read_text()))
        model = init_model(config)
        load_params(model, params_from_hf(load_file(folder / "model.safetensors"), config))
        parameters = sum(x.size for x in model_leaves(model))
        engine_config = EngineConfig(dtype, max_sequences=batch, max_length=context + room)
        self.engine = Engine(model, config=engine_config)
        self._fill(context, batch, room)
        self.step(1)
        per_token = self.engine.cache.format.bytes_per_token(
            config.attention.kv_lora_rank, config.attention.qk_rope_head_dim
        )
        return {"parameters": parameters, "cache_bytes": per_token * context * batch * config.num_layers}

    def _fill(self, context: int, batch: int, room: int) -> None:
        """Every sequence at `context` tokens, its pages full of noise."""
        engine = self.engine
        cache = engine.cache
        pages = np.arange(batch * cache.block_table.shape[1], dtype=np.int32).reshape(batch, -1)
        rng = np.random.default_rng(0)
        pool = {}
        for name, part in cache.pool.items():
            noise = rng.standard_normal(part.shape, np.float32)
            if part.dtype == np.uint16:  # bfloat16 bits
                noise = (noise.view(np.uint32) >> 16).astype(np.uint16)
            elif part.dtype == np.uint8:  # e4m3 codes, without NaN
                noise = rng.integers(0, 0x7F, part.shape, np.uint8)
            pool[name] = jnp.asarray(noise)
        state = dataclasses.replace(
            engine.state,
            cache=dataclasses.replace(cache, pool=pool, block_table=jnp.asarray(pages)),
            token=jnp.arange(batch, dtype=jnp.int32) + 5,
            position=jnp.full((batch,), context, jnp.int32),
            limit=jnp.full((batch,), room, jnp.int32),
            active=jnp.ones((batch,), bool),
        )
        # Bound to the device, as the engine's own state is; else the second step would compile again.
        self.state = jax.device_put(state, engine.state.token.sharding)

    def step(self, n: int):
        seconds = []
        for _ in range(n):
            start = time.perf_counter()
            self.state, sampled = self.engine.decode_step(self.state)
            np.asarray(sampled.token)
            jax.block_until_ready(self.state)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def release(self):
        self.engine = self.state = None
        return {}


def model_leaves(model):
    from flax import nnx

    return jax.tree.leaves(nnx.state(model, nnx.Param))


if __name__ == "__main__":
    serve(Worker)
