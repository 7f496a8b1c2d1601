"""Codebooks of the cache format `nuq4`: fitting one to latents, and the file that holds those of all layers."""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlaflax.config import ConfigError, require
from mlaflax.files import write_whole
from mlaflax.formats import (
    CODEBOOK_SIZE,
    GAUSSIAN_CODEBOOK,
    LEVEL_CODES,
    LEVEL_DEGREE,
    codebook_codes,
    level_values,
    require_halves,
    scale_values,
)

FILE_NAME = "codebook.json"
_VERSION = 2  # 1: levels that lie on no curve
_FORMAT = "nuq4"
# Legendre polynomials at the codes: a basis in which a fit in float32 is well conditioned.
_BASIS = np.polynomial.legendre.legvander(LEVEL_CODES, LEVEL_DEGREE).astype(np.float32)
# How far the levels of a file may be from the curve that they are read by, for their digits' sake.
_TOLERANCE = 1e-4


def fit_codebook(latents: Float[Array, "n c"], iterations: int = 20) -> Float[np.ndarray, "16"]:
    """The codebook under which `nuq4` loses least of these latents, by squared error.

    Lloyd's algorithm: scales and codes are chosen as the format chooses them, then the curve of the levels moves to
    where the squared error of all values is least, and so on. Levels have no unit, as each block is scaled: the
    largest magnitude is kept at the Gaussian codebook's.

    Args:
      latents: float32, in the stored basis. Some 10^5 values are enough; each iteration goes over all of them.
      iterations: of both steps. After 20 the error changes by less than 0.1 %.

    Returns:
      float32 levels, ascending.

    Raises:
      ConfigError: latents that are not finite, none at all, or of a width that the format cannot hold.
    """
    latents = jnp.asarray(latents, jnp.float32)
    require(
        latents.ndim == 2 and latents.size > 0, "latents", latents.shape, "must be of shape [n, c], not empty"
    )
    require_halves(_FORMAT, latents.shape[1])
    require(bool(jnp.isfinite(latents).all()), "latents", "NaN or infinity", "must be finite")
    return np.asarray(_lloyd(latents, jnp.asarray(GAUSSIAN_CODEBOOK), iterations))


@jax.jit
def _lloyd(latents: Array, codebook: Array, iterations: Array | int) -> Array:
    reach = jnp.max(jnp.abs(codebook))

    def step(_, carry):
        codebook, best, least = carry
        codes, bits, scaled = codebook_codes(latents, codebook)
        # An error of a scaled value counts as often as the square of its scale says.
        weight = jnp.square(scale_values(bits))[..., None]
        weight = jnp.broadcast_to(weight, (*bits.shape, latents.shape[1] // bits.shape[1]))
        weight = weight.reshape(latents.shape)
        error = jnp.sum(weight * jnp.square(level_values(codes, codebook) - scaled))
        best, least = jnp.where(error < least, codebook, best), jnp.minimum(error, least)
        mine = [jnp.where(codes == i, weight, 0.0) for i in range(CODEBOOK_SIZE)]
        share = jnp.stack([jnp.sum(m) for m in mine])
        total = jnp.stack([jnp.sum(m * scaled) for m in mine])
        # Held to where it is a little: a curve swings where no value is near.
        hold = 1e-2 * jnp.mean(share) + jnp.finfo(jnp.float32).tiny
        gram = (_BASIS.T * (share + hold)) @ _BASIS
        moved = _BASIS @ jnp.linalg.solve(gram, _BASIS.T @ (total + hold * codebook))
        moved = moved * (reach / jnp.max(jnp.abs(moved)))
        return jnp.where(jnp.all(jnp.diff(moved) > 0), moved, codebook), best, least

    # Once more than it moves, to know the last one's error.
    return lax.fori_loop(0, iterations + 1, step, (codebook, codebook, jnp.inf))[1]


def save_codebooks(
    directory: str | os.PathLike,
    levels: Float[Array, "layers 16"],
    *,
    kv_lora_rank: int,
    notes: Any = None,
) -> pathlib.Path:
    """Write `codebook.json` into `directory`, whole or not at all; returns its path.

    Args:
      levels: float32, one codebook per layer, dense layers first.
      kv_lora_rank: the latent's width in the model they belong to.
      notes: anything JSON can say, about the text they were fitted to perhaps.

    Raises:
      ConfigError: levels that are not finite, not ascending or not on a polynomial of degree 5.
    """
    rows = np.asarray(levels, np.float32)
    require(
        rows.ndim == 2 and rows.shape[1] == CODEBOOK_SIZE,
        "levels", rows.shape, f"must be of shape [num_layers, {CODEBOOK_SIZE}]",
    )  # fmt: skip
    _require_sound(rows, "levels")
    content = {
        "version": _VERSION,
        "format": _FORMAT,
        "kv_lora_rank": kv_lora_rank,
        "num_layers": len(rows),
        "levels": rows.tolist(),
        "notes": notes,
    }
    path = pathlib.Path(directory) / FILE_NAME
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path


def load_codebooks(
    directory: str | os.PathLike, *, num_layers: int, kv_lora_rank: int
) -> Float[np.ndarray, "layers 16"]:
    """The levels in `directory`'s `codebook.json`, float32, for a model of that depth and latent width.

    Raises:
      ConfigError: the file is no codebook file of this version, belongs to another model, or holds levels that
        are not finite, not ascending or not on a polynomial of degree 5.
      OSError: it cannot be read.
    """
    path = pathlib.Path(directory) / FILE_NAME
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: must be JSON ({error})") from error
    require(isinstance(content, dict), str(path), type(content).__name__, "must hold one JSON object")
    for name, expected in (
        ("version", _VERSION),
        ("format", _FORMAT),
        ("kv_lora_rank", kv_lora_rank),
        ("num_layers", num_layers),
    ):
        require(content.get(name) == expected, f"{path}: {name}", content.get(name), f"must be {expected!r}")
    try:
        levels = np.asarray(content.get("levels"), np.float32)
    except (TypeError, ValueError):
        levels = np.zeros(0)
    if levels.shape != (num_layers, CODEBOOK_SIZE):
        raise ConfigError(f"{path}: levels must be {num_layers} lists of {CODEBOOK_SIZE} numbers")
    _require_sound(levels, f"{path}: levels")
    return levels


def _require_sound(levels: np.ndarray, field: str) -> None:
    for layer, row in enumerate(levels):
        require(bool(np.isfinite(row).all()), f"{field}[{layer}]", row.tolist(), "must be finite")
        require(bool((np.diff(row) > 0).all()), f"{field}[{layer}]", row.tolist(), "must ascend")
        curve = _BASIS @ np.linalg.lstsq(_BASIS, row, rcond=None)[0]
        smooth = np.abs(curve - row).max() <= _TOLERANCE * np.abs(row).max()
        require(
            bool(smooth),
            f"{field}[{layer}]",
            row.tolist(),
            f"must lie on a polynomial of degree {LEVEL_DEGREE}, as `python -m infer calibrate` fits them",
        )
