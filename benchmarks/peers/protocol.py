"""The line protocol between a benchmark's driver and one worker per peer, and both of its ends.

A worker is a long-lived process in its peer's own virtual environment. The driver writes one JSON object
per line to its stdin and reads one per line from its stdout; a request is `{"op": NAME, ...arguments}`, the
answer `{"ok": {...}}` or `{"error": TEXT}`. The operations of every worker:

    setup(threads, ...)   build or reset the workload, warm it up (compile) -> {"parameters": int, ...}
    step(n)               run n steps -> {"seconds": [wall seconds of each of the n steps]}
    release()             drop what the last setup allocated, keep the process -> {}
    quit                  leave (also on end of input)

What a decode worker's `setup` takes and what a step means is said in `benchmarks/decode.py`, the same for
training in `benchmarks/train.py`. Workers are long-lived so that the driver can take turns among them: on a
machine whose speed drifts, only figures taken next to each other can be divided by each other.

Standard library only: workers import this from environments that hold neither mlaflax nor jax.
"""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import traceback
from typing import Any, Protocol

THREADS_ENV = "MLAFLAX_BENCHMARK_THREADS"
ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "benchmarks"


class Worker(Protocol):
    """What a worker module hands to `serve`; each method takes and returns JSON-ready values."""

    def setup(self, **arguments: Any) -> dict: ...

    def step(self, n: int) -> dict: ...

    def release(self) -> dict: ...


def serve(make_worker) -> None:
    """Worker side: answer requests until `quit`; `make_worker()` imports the peer and returns a `Worker`.

    The process's cores are limited before the peer is imported, so that its thread pools see the limit.
    Libraries that print to stdout would break the protocol: their output goes to stderr.
    """
    threads = int(os.environ.get(THREADS_ENV, "0"))
    if threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "quit":
            return
        try:
            if worker is None:
                worker = make_worker()
            answer = {"ok": getattr(worker, op)(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class PeerError(RuntimeError):
    """A worker refused, failed, died or did not answer in time; the message says which and shows its log."""


class Peer:
    """Driver side: one worker process, started on first use and again after a failure.

    Args:
      name: of the log file in `.cache/benchmarks/logs`.
      python: interpreter of the peer's virtual environment.
      module: dotted name of the worker module, run with `-m` from the checkout.
      arguments: command line of the worker.
      threads: cores and threads the worker may use.
      timeout: seconds that one request may take.
    """

    def __init__(self, name, python, module, arguments=(), threads=2, timeout=900.0):
        self.name, self.python, self.module, self.arguments = name, str(python), module, list(arguments)
        self.threads, self.timeout = threads, timeout
        self.log = CACHE / "logs" / f"{name}.log"
        self._process: subprocess.Popen | None = None

    def __getattr__(self, op):
        if op.startswith("_"):
            raise AttributeError(op)
        return lambda **arguments: self._request(op, arguments)

    def quit(self) -> None:
        """End the worker, gently first."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.write(b'{"op": "quit"}\n')
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self) -> subprocess.Popen:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(self.threads)
        environment = os.environ | {
            THREADS_ENV: threads,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [self.python, "-m", self.module, *self.arguments],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def _request(self, op: str, arguments: dict) -> dict:
        if self._process is None:
            try:
                self._process = self._start()
            except OSError as error:
                hint = "; benchmarks/peers/setup.sh makes the environments"
                raise PeerError(f"{self.name} cannot start: {error}{hint}") from error
        process = self._process
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            process.stdin.flush()
            # An answer is written at once, so a readable pipe holds a whole line or the end of the file.
            ready, _, _ = select.select([process.stdout], [], [], self.timeout)
            line = process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = b""
        if not line:
            process.kill()
            code = process.wait()
            self._process = None
            reason = f"died (status {code})" if line == b"" else f"gave no answer in {self.timeout:.0f} s"
            raise PeerError(f"{self.name} {reason} at {op}; log: {self.log}\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name} at {op}: {answer['error']}")
        return answer["ok"]

    def _tail(self, lines: int = 5) -> str:
        with open(self.log, errors="replace") as log:
            return "".join("    " + line for line in log.readlines()[-lines:])
