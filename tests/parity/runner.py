"""The library's model, driven the way the comparisons need it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from mlaflax.cache import LatentCache
from mlaflax.config import ModelConfig
from mlaflax.convert.deepseek import load_params
from mlaflax.model.transformer import Transformer
from tests.parity.golden import Batch


def build(config: ModelConfig, params: dict[str, Any]) -> Transformer:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    load_params(model, params)
    return model


class Runner:
    """Calls a model under jit.

    Each runner traces anew, so that a function replaced under the model's feet counts. Unless `optimised`,
    programs are compiled quickly rather than well: most of the time of these tests is compilation.
    """

    def __init__(self, model: Transformer, *, optimised: bool = False):
        self.model = model
        graph, self.state = nnx.split(model)

        def forward(state, tokens, positions, segment_ids, cache):
            model = nnx.merge(graph, state)
            out = model(tokens, positions, segment_ids, cache=cache)
            return model.logits(out.hidden), out.cache

        options = None if optimised else {"xla_backend_optimization_level": 0}
        self.forward = jax.jit(forward, compiler_options=options)

    def logits(self, batch: Batch) -> np.ndarray:
        """One forward pass without a cache."""
        return np.asarray(self.forward(self.state, batch.tokens, batch.positions, batch.segment_ids, None)[0])

    def cached_logits(self, batch: Batch, chunks: Sequence[int] = ()) -> np.ndarray:
        """The batch through an empty f32 cache, in chunks of these widths; what remains is the last one."""
        b, q = batch.tokens.shape
        cache = LatentCache.create(self.model.config, "f32", num_sequences=b, max_length=q)
        out = []
        for piece in np.split(np.arange(q), np.cumsum(chunks, dtype=int)):
            if len(piece):
                at = np.s_[:, piece[0] : piece[-1] + 1]
                tokens, positions, segments = (x[at] for x in batch[:3])
                step, cache = self.forward(self.state, tokens, positions, segments, cache)
                out.append(np.asarray(step))
        return np.concatenate(out, axis=1)

    def generate(self, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Greedy tokens int32 `[n]` after `prompt`, and the logits `[n, w]` they were taken from."""
        cache = LatentCache.create(self.model.config, "f32", num_sequences=1, max_length=len(prompt) + count)
        tokens, positions = prompt[None], np.arange(len(prompt), dtype=np.int32)[None]
        chosen, rows = [], []
        for _ in range(count):
            step, cache = self.forward(self.state, tokens, positions, np.ones_like(tokens), cache)
            rows.append(np.asarray(step[0, -1]))
            chosen.append(int(rows[-1].argmax()))
            tokens, positions = np.array([[chosen[-1]]], np.int32), positions[:, -1:] + 1
        return np.array(chosen, np.int32), np.stack(rows)
