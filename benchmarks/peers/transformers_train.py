"""Training worker of Hugging Face transformers on torch, CPU: DeepseekV3 with random weights.

    python -m benchmarks.peers.transformers_train eager|grouped_mm

The argument is transformers' own choice of how experts are computed. A step is what a plain training loop
does: forward with the model's own cross-entropy, backward, clipping by the global norm, AdamW (fused).
"""

import sys
import time

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from benchmarks.peers import train_data
from benchmarks.peers.protocol import serve

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Worker:
    def __init__(self, experts: str):
        self.experts = experts

    def setup(
        self, threads: int, dtype: str, batch: int, length: int, model: dict, optimizer: dict, config: str
    ):
        del config  # ours alone
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        settings = DeepseekV3Config(**model)
        settings._experts_implementation = self.experts
        settings._attn_implementation = "sdpa"
        self.model = DeepseekV3ForCausalLM(settings).to(DTYPES[dtype]).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer["learning_rate"],
            betas=(optimizer["beta1"], optimizer["beta2"]),
            eps=optimizer["epsilon"],
            weight_decay=optimizer["weight_decay"],
            fused=True,
        )
        self.clip_norm = optimizer["clip_norm"]
        data = train_data.batches(model["vocab_size"], batch, length)
        # `labels` are shifted inside the model: tokens and targets are the same array.
        self.batches = [torch.from_numpy(x[:, :length]) for x in data]
        self.count = 0
        first = self.step(1)
        return {"parameters": sum(p.numel() for p in self.model.parameters()), "loss": first["losses"][0]}

    def step(self, n: int):
        seconds, losses = [], []
        for _ in range(n):
            tokens = self.batches[self.count % len(self.batches)]
            self.count += 1
            start = time.perf_counter()
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            if self.clip_norm:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "losses": losses}

    def release(self):
        self.model = self.optimizer = self.batches = None
        return {}


if __name__ == "__main__":
    serve(lambda: Worker(sys.argv[1]))
