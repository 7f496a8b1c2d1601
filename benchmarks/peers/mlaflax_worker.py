"""Decode worker of mlaflax: the engine's own compiled decode step, over a cache that was not computed.

python -m benchmarks.peers.mlaflax_worker

`setup`'s `dtype` is the cache's format: weights and products are float32 on CPU, where narrower ones are
slower.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.peers.protocol import serve
from mlaflax import runtime
from mlaflax.convert import deepseek, llama
from mlaflax.convert.layout import load_params
from mlaflax.decode import Engine, EngineConfig
from mlaflax.formats import Format
from mlaflax.model import init_model


class Worker:
    def __init__(self):
        runtime.keep_freed_memory()

    def setup(self, threads: int, context: int, batch: int, dtype: str, room: int, weights: str):
        del threads  # the process is limited to them
        folder = pathlib.Path(weights)
        described = json.loads((folder / "config.json").read_text())
        family = llama if described["architectures"][0] in llama.ARCHITECTURES else deepseek
        config = family.model_config_from_hf(described)
        config = dataclasses.replace(config, max_length=max(config.max_length, context + room))
        model = init_model(config)
        load_params(model, family.params_from_hf(load_file(folder / "model.safetensors"), config))
        parameters = sum(x.size for x in model_leaves(model))
        engine_config = EngineConfig(dtype, max_sequences=batch, max_length=context + room)
        self.engine = Engine(model, config=engine_config)
        self._fill(context, batch, room)
        self.step(1)
        return {"parameters": parameters, "cache_bytes": self.engine.cache.nbytes()}

    def _fill(self, context: int, batch: int, room: int) -> None:
        """Every sequence at `context` tokens, its pages full of noise."""
        engine = self.engine
        cache = engine.cache
        pages = np.arange(batch * cache.block_table.shape[1], dtype=np.int32).reshape(batch, -1)
        cache = dataclasses.replace(
            cache,
            pool=noise(cache.format, cache.pool, cache.layer_codebook(0)),
            block_table=jnp.asarray(pages),
        )
        if cache.hot is not None:
            hot = cache.hot
            sinks, before = hot.config.sinks, max(0, context - hot.config.ring * hot.config.page)
            kept = np.linspace(sinks, before, hot.config.salient, endpoint=False).astype(np.int32)
            index = jnp.broadcast_to(jnp.asarray(kept), hot.index.shape)
            hot = dataclasses.replace(hot, pool=noise(hot.format, hot.pool), index=index)
            cache = dataclasses.replace(cache, hot=hot)
        state = dataclasses.replace(
            engine.state,
            cache=cache,
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


def noise(fmt: Format, pool: Mapping[str, jax.Array], codebook=None) -> dict[str, jax.Array]:
    """Pages of a format full of packed noise: one page's tokens, over and over."""
    t, r = pool["rope"].shape[-1], pool["rope"].shape[-2]
    c = fmt.latent_dims(pool)
    rng = np.random.default_rng(0)
    latent, rope = (jnp.asarray(rng.standard_normal((t, size), np.float32)) for size in (c, r))
    parts = fmt.parts(c, r)
    return {
        name: jnp.broadcast_to(rows if parts[name].token_major else rows.T, pool[name].shape)
        for name, rows in fmt.pack(latent, rope, codebook).items()
    }


def model_leaves(model):
    from flax import nnx

    return jax.tree.leaves(nnx.state(model, nnx.Param))


if __name__ == "__main__":
    serve(Worker)
