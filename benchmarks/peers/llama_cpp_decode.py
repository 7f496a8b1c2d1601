"""Decode worker of llama.cpp (through llama-cpp-python's C bindings), CPU.

    python -m benchmarks.peers.llama_cpp_decode mla|gqa|llama

`llama` is the model in the folder `weights`, the others are those of benchmarks/decode.py.

`setup`'s `dtype` is WEIGHTS or WEIGHTS+CACHE, of f32 and f16 and, for the cache, q8_0 or q4_0, as in
`f16+q8_0`. A trailing `/fa` turns flash attention on, which a quantised cache needs.
"""

import ctypes
import pathlib
import struct
import sys
import time

import llama_cpp as llama
import numpy as np

from benchmarks.peers import gguf_weights, shapes
from benchmarks.peers.protocol import CACHE, serve

CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
PREFIX = 256  # tokens that are really prefilled; the rest of the context repeats them
HEADER = 8  # bytes of magic and version (state of one sequence)


class SequenceState:
    """llama.cpp's saved state of one sequence, taken apart and rebuilt for a longer sequence.

    The layout (llama-kv-cache.cpp, `state_write`): header; uint32 streams; per stream uint32 cells, and where
    there are cells: per cell (int32 position, uint32 count = 1, int32 sequence), uint32 v_trans, uint32
    layers, then per layer of K, and per layer of V unless V is a view of K (MLA): int32 type, uint64 bytes of
    a row, rows. A transposed V has another form, which is refused.
    """

    def __init__(self, raw: bytes):
        self.header = raw[:4]
        offset = HEADER
        (self.streams,) = struct.unpack_from("<I", raw, offset)
        offset += 4
        self.rows: list[tuple[int, int, bytes]] = []
        for stream in range(self.streams):
            (cells,) = struct.unpack_from("<I", raw, offset)
            offset += 4
            if cells == 0:
                continue
            if cells != PREFIX:
                raise ValueError(f"state holds {cells} cells, not {PREFIX}: unknown layout")
            offset += 12 * cells
            self.transposed, self.layers = struct.unpack_from("<II", raw, offset)
            offset += 8
            end = len(raw) - 4 * (self.streams - 1 - stream)  # the streams that follow are empty
            while offset < end:
                if self.transposed and len(self.rows) == self.layers:
                    raise ValueError("V is stored transposed: turn flash attention on")
                kind, size = struct.unpack_from("<iQ", raw, offset)
                offset += 12
                self.rows.append((kind, size, raw[offset : offset + size * cells]))
                offset += size * cells

    def repeated(self, sequence: int, length: int) -> bytes:
        """State of `sequence` with the prefix's rows repeated up to `length` tokens."""
        out = [self.header, struct.pack("<iI", sequence, self.streams)]
        for stream in range(self.streams):
            if stream != (sequence if self.streams > 1 else 0):
                out.append(struct.pack("<I", 0))
                continue
            out.append(struct.pack("<I", length))
            out += [struct.pack("<iIi", position, 1, sequence) for position in range(length)]
            out.append(struct.pack("<II", self.transposed, self.layers))
            for kind, size, rows in self.rows:
                out.append(struct.pack("<iQ", kind, size))
                out.append((rows * -(-length // PREFIX))[: size * length])
        return b"".join(out)


class Worker:
    def __init__(self, variant: str):
        self.variant = variant
        self.model = self.context = self.path = None
        llama.llama_backend_init()
        self.batch = llama.llama_batch_init(512, 0, 1)

    def _load(self, kind: str, weights: str | None) -> None:
        path = CACHE / f"{self.variant}-{kind}.gguf"
        if path == self.path:
            return
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.variant == "mla":
                gguf_weights.write_mla(pathlib.Path(weights), path, kind)
            elif self.variant == "llama":
                gguf_weights.write_llama(pathlib.Path(weights), path, kind)
            else:
                gguf_weights.write_gqa(shapes.GQA, path, kind)
        if self.model:
            llama.llama_model_free(self.model)
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.path = path
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def _decode(self, entries: list[tuple[int, int, int]]) -> None:
        """Run one batch of (token, position, sequence), logits of each wanted."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = 1
        status = llama.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        llama.llama_synchronize(self.context)

    def _fill(self, length: int) -> int:
        """Fill every sequence's cache up to `length` tokens; returns the cache's bytes."""
        self._decode([((i * 7919) % 30_000 + 5, i, 0) for i in range(PREFIX)])
        size = llama.llama_state_seq_get_size(self.context, 0)
        buffer = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data(self.context, buffer, size, 0)
        state = SequenceState(bytes(buffer))
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        for sequence in range(self.sequences):
            raw = state.repeated(sequence, length)
            buffer = (ctypes.c_uint8 * len(raw)).from_buffer_copy(raw)
            if not llama.llama_state_seq_set_data(self.context, buffer, len(raw), sequence):
                raise RuntimeError("llama.cpp refused the repeated state: unknown layout")
        return self.sequences * length * sum(size for _, size, _ in state.rows)

    def setup(
        self, threads: int, context: int, batch: int, dtype: str, room: int, weights: str | None = None
    ):
        self.release()
        types, _, flash = dtype.partition("/")
        kind, _, cache_kind = types.partition("+")
        cache_kind = cache_kind or kind
        self._load(kind, weights)
        parameters = llama.llama_context_default_params()
        per_sequence = -(-(context + room + 2) // 256) * 256
        parameters.n_ctx = per_sequence * batch
        parameters.n_seq_max = batch
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = CACHE_TYPES[cache_kind]
        parameters.flash_attn_type = 1 if flash else 0
        parameters.kv_unified = False
        self.context = llama.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise ValueError(f"llama.cpp refuses {dtype}")
        self.sequences, self.position = batch, context
        self.tokens = [7] * batch
        cache_bytes = self._fill(context)
        self.step(1)
        return {"parameters": int(llama.llama_model_n_params(self.model)), "cache_bytes": cache_bytes}

    def step(self, n: int):
        seconds = []
        for _ in range(n):
            start = time.perf_counter()
            self._decode([(token, self.position, s) for s, token in enumerate(self.tokens)])
            logits = (llama.llama_get_logits_ith(self.context, s) for s in range(self.sequences))
            self.tokens = [int(np.ctypeslib.as_array(x, (self.vocabulary,)).argmax()) for x in logits]
            seconds.append(time.perf_counter() - start)
            self.position += 1
        return {"seconds": seconds}

    def release(self):
        context, self.context = self.context, None
        if context:
            llama.llama_free(context)
        return {}


if __name__ == "__main__":
    serve(lambda: Worker(sys.argv[1]))
