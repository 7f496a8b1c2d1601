"""Decode worker of EasyDeL (JAX): its DeepseekV3 with its own dense key-value cache, compiled, cache donated.

    python -m benchmarks.peers.easydel_decode

EasyDeL keeps expanded keys and values per head in this cache, (nope + rope + v) x heads numbers per token and
layer. Its latent cache is served by a kernel that needs an accelerator. Weights are random and its own.
"""

import functools
import json
import pathlib
import time

import easydel
import jax
import jax.numpy as jnp
from eformer.common_types import MODE_DECODE
from ejkernel.types import MaskInfo
from flax import nnx

from benchmarks.peers.protocol import serve

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
# Fields of config.json that EasyDeL's configuration has under another name or fills itself.
FOREIGN = {"architectures", "model_type", "dtype", "rope_parameters", "rope_interleave", "num_mtp_layers"}


class Worker:
    def __init__(self):
        self.dtype = self.cache = None

    def _load(self, dtype: str, weights: str) -> None:
        if dtype == self.dtype:
            return
        fields = json.loads((pathlib.Path(weights) / "config.json").read_text())
        fields = {k: v for k, v in fields.items() if k not in FOREIGN}
        kind = DTYPES[dtype]
        config = easydel.DeepseekV3Config(**fields, num_nextn_predict_layers=0, kvdtype=kind, attn_dtype=kind)
        self.model = easydel.DeepseekV3ForCausalLM.sequential_init(
            config=config, dtype=kind, param_dtype=kind, rngs=nnx.Rngs(0)
        )
        graph, self.state = nnx.split(self.model)
        self.dtype = dtype

        @functools.partial(jax.jit, donate_argnums=1)
        def decode(state, cache, token, position):
            model = nnx.merge(graph, state)
            length = cache.views[0].key.shape[1]
            # One query row; the cache hides the keys that are not there yet.
            mask = MaskInfo.from_attention_mask(jnp.ones((token.shape[0], 1, 1, length), jnp.bool_))
            out = model(token, mask_info=mask, position_ids=position, past_key_values=cache, mode=MODE_DECODE)
            return out.logits[:, -1].argmax(-1).astype(jnp.int32)[:, None], out.past_key_values, position + 1

        self._decode = decode

    def setup(self, threads: int, context: int, batch: int, dtype: str, room: int, weights: str):
        del threads  # the process is limited to its cores
        self.release()
        self._load(dtype, weights)
        with self.model.mesh:
            cache = self.model.init_cache(batch, context + room + 2)
            for i, view in enumerate(cache.views):
                key, value = (
                    jax.random.normal(jax.random.key(2 * i + j), x.shape, x.dtype)
                    for j, x in enumerate((view.key, view.value))
                )
                cache.views[i] = view.replace(
                    key=key, value=value, indexs=jnp.full_like(view.indexs, context)
                )
        held = sum(view.key.nbytes + view.value.nbytes for view in cache.views)
        self.cache = cache
        self.token = jnp.full((batch, 1), 7, jnp.int32)
        self.position = jnp.full((batch, 1), context, jnp.int32)
        self.step(2)
        return {
            "parameters": sum(x.size for x in jax.tree.leaves(self.state)),
            "cache_bytes": held * context // (context + room + 2),
        }

    def step(self, n: int):
        seconds = []
        with self.model.mesh:
            for _ in range(n):
                start = time.perf_counter()
                self.token, self.cache, self.position = self._decode(
                    self.state, self.cache, self.token, self.position
                )
                self.token.block_until_ready()
                seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def release(self):
        self.cache = None
        return {}


if __name__ == "__main__":
    serve(Worker)
