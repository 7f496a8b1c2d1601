"""Settings for every test: CPU, compiled programs kept between runs, mistakes loud."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / ".cache" / "xla-tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax

# A matrix product in a lower precision than its inputs, or a silent rank promotion, is a bug here.
jax.config.update("jax_default_matmul_precision", "highest")
