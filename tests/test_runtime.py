"""Settings of a process, each tried in a process of its own."""

import os
import pathlib
import platform
import subprocess
import sys

import pytest


def python(code: str, **env: str) -> str:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "MALLOC_", "GLIBC_"))
    }
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


# Allocates, touches and frees 64 MB in a thread, ten times; prints the page faults of the last nine.
FAULTS = """
import ctypes, resource, threading
from mlaflax.runtime import keep_freed_memory
tuned = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
counts = []
def work():
    for _ in range(10):
        block = libc.malloc(64 << 20)
        libc.memset(block, 1, 64 << 20)
        libc.free(block)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(tuned, counts[-1] - counts[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_used_again():
    tuned, faults = python(FAULTS).split()
    assert tuned == "True"
    assert int(faults) < 100
    tuned, faults = python(FAULTS, MALLOC_ARENA_MAX="2").split()
    assert tuned == "False"  # the user's own settings stand
    assert int(faults) > 1000


def test_compiled_programs_are_kept(tmp_path: pathlib.Path):
    code = (
        "import jax\nfrom mlaflax.runtime import use_compilation_cache\nprint(use_compilation_cache())\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.jit(lambda x: x + 1)(1.0)"
    )
    where = python(code, XDG_CACHE_HOME=str(tmp_path)).strip()
    assert where == str(tmp_path / "mlaflax" / "xla")
    assert any(pathlib.Path(where).iterdir())
    mine = str(tmp_path / "mine")
    assert python(code, JAX_COMPILATION_CACHE_DIR=mine).strip() == mine


COLLECTING = """
import gc, os, signal, sys
from mlaflax.runtime import interrupt_signal, raise_signals
import jax  # has a callback in the garbage collector, where Python ignores exceptions
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process inherited
raise_signals()
number = signal.Signals[sys.argv[1]]

def _xla_gc_callback(phase, info):
    if phase == "start" and not sent:
        sent.append(True)
        os.kill(os.getpid(), number)

sent = []
gc.callbacks.append(_xla_gc_callback)
try:
    gc.collect()
    signal.pause()
except KeyboardInterrupt as error:
    print(interrupt_signal(error).name)
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_during_garbage_collection_is_not_lost(number):
    result = subprocess.run(
        [sys.executable, "-c", COLLECTING, number], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == number, result.stderr
    assert not result.stderr
