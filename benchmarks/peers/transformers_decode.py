"""Decode worker of Hugging Face transformers on torch, CPU.

    python -m benchmarks.peers.transformers_decode mla|absorbed|gqa|llama

`mla` is DeepseekV3 as it comes: it caches the latent and expands all of it again at every step. `absorbed` is
the same model and weights with its attention replaced by the absorbed form in eager torch: what torch can
reach without a kernel of its own. `gqa` is a Llama of as many parameters, `llama` the one in the folder `weights`,
which also scores texts and renders chat templates:

    nll(weights, rows, threads) -> {"nll": sum over rows of the negative log-likelihoods of all tokens but the first}
    render(template, messages) -> {"text": the chat, up to where an answer begins}
"""

import functools
import sys
import time

import jinja2
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.utils import logging

from benchmarks.peers import shapes
from benchmarks.peers.protocol import serve

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def absorbed_attention(attention, hidden_states, position_embeddings, attention_mask, cache, **_):
    """`DeepseekV3Attention.forward` for one new position: one latent per token serves all heads."""
    b, q, _ = hidden_states.shape
    n, r, v = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    h, c = attention.num_heads, attention.kv_lora_rank
    query = attention.q_proj(hidden_states).view(b, q, h, n + r).transpose(1, 2)
    q_nope, q_rope = query.split([n, r], -1)
    latent, k_rope = attention.kv_a_proj_with_mqa(hidden_states).split([c, r], -1)
    latent = attention.kv_a_layernorm(latent).view(b, 1, q, c)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope.view(b, 1, q, r), *position_embeddings)
    latent, k_rope = (x[:, 0] for x in cache.update(latent, k_rope, attention.layer_idx))

    kv_b = attention.kv_b_proj.weight.view(h, n + v, c)
    q_latent = torch.einsum("bhqn,hnc->bqhc", q_nope, kv_b[:, :n]).reshape(b, q * h, c)
    q_rope = q_rope.transpose(1, 2).reshape(b, q * h, r)
    scores = torch.baddbmm(q_rope @ k_rope.transpose(1, 2), q_latent, latent.transpose(1, 2))
    weights = torch.softmax(scores.float() * attention.scaling, -1).to(latent.dtype)
    out = (weights @ latent).view(b, q, h, c)
    out = torch.einsum("bqhc,hvc->bqhv", out, kv_b[:, n:]).reshape(b, q, h * v)
    return attention.o_proj(out), None


class Worker:
    def __init__(self, variant: str):
        self.variant = variant
        self.model = self.cache = self.dtype = None

    def _load(self, dtype: str, weights: str | None) -> None:
        if dtype == self.dtype:
            return
        self.model = None  # the old one goes before the new one comes
        if self.variant == "gqa":
            self.model = LlamaForCausalLM(LlamaConfig(**shapes.GQA)).to(DTYPES[dtype])
        elif self.variant == "llama":
            self.model = AutoModelForCausalLM.from_pretrained(weights, dtype=DTYPES[dtype])
        else:
            self.model = DeepseekV3ForCausalLM.from_pretrained(weights, dtype=DTYPES[dtype])
        self.model.eval()
        self.dtype = dtype
        if self.variant == "absorbed":
            error = self._absorb()
            # bf16 keeps 8 bits of a logit; the logits of random weights are below 4.
            limit = 1e-3 if dtype == "f32" else 0.1
            if error > limit:
                raise ValueError(f"absorbed attention differs from the model's own by {error:.2e}")

    def _absorb(self) -> float:
        """Replace the attention's forward; returns the largest difference it makes to logits."""
        token = torch.tensor([[7]])
        before = self.model(token, cache=self._filled(64, 1), use_cache=True).logits
        for layer in self.model.model.layers:
            layer.self_attn.forward = functools.partial(absorbed_attention, layer.self_attn)
        after = self.model(token, cache=self._filled(64, 1), use_cache=True).logits
        return (after - before).abs().max().item()

    def _filled(self, context: int, batch: int) -> DynamicCache:
        config = self.model.config
        cache = DynamicCache(config=config)
        random = torch.Generator().manual_seed(1)
        if self.variant in ("gqa", "llama"):
            kinds = [(config.num_key_value_heads, config.head_dim)] * 2
        else:
            kinds = [(1, config.kv_lora_rank), (1, config.qk_rope_head_dim)]
        for layer in range(config.num_hidden_layers):
            arrays = [
                torch.randn(batch, heads, context, width, generator=random).to(DTYPES[self.dtype])
                for heads, width in kinds
            ]
            cache.update(*arrays, layer)
        return cache

    @torch.inference_mode()
    def setup(
        self, threads: int, context: int, batch: int, dtype: str, room: int, weights: str | None = None
    ):
        del room  # the cache grows by concatenation
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.release()
        self._load(dtype, weights)
        self.cache = self._filled(context, batch)
        self.token = torch.full((batch, 1), 7)
        self.step(1)
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "cache_bytes": sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values)),
        }

    @torch.inference_mode()
    def step(self, n: int):
        seconds = []
        for _ in range(n):
            start = time.perf_counter()
            logits = self.model(self.token, cache=self.cache, use_cache=True).logits
            self.token = logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    @torch.inference_mode()
    def nll(self, weights: str, rows: list[list[int]], threads: int):
        torch.set_num_threads(threads)
        self._load("f32", weights)
        total = 0.0
        for row in rows:
            tokens = torch.tensor([row])
            logits = self.model(tokens, use_cache=False).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        return {"nll": total}

    def render(self, template: str, messages: list[dict]):
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        return {
            "text": environment.from_string(template).render(messages=messages, add_generation_prompt=True)
        }

    def release(self):
        self.cache = None
        return {}


if __name__ == "__main__":
    logging.disable_progress_bar()
    serve(lambda: Worker(sys.argv[1]))
