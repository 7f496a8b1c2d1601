"""A rotation of the latents, folded into the weights around them.

The cache stores `rms_normalize(x kv_down)`. An orthogonal matrix `R` commutes with the normalisation, so with
`kv_down R`, and `R` undone by what reads the latent (k_up and v_up, the norm's weight folded in first), the model
computes the same and stores `latent R`. Every stored dim is then a mixture of all, closer to a Gaussian and without
dims that are large in every token: what 4-bit formats round best (QuaRot, arXiv:2404.00456). Costs nothing at run
time.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.linalg

Tree = Any


def rotation(c: int) -> np.ndarray:
    """An orthogonal float32 matrix `[c, c]`, always the same: a Hadamard matrix with random signs of its rows.

    Where `c` is no power of two, the largest power that divides it is mixed, dims that far apart.
    """
    power = c & -c
    mixed = np.kron(scipy.linalg.hadamard(power), np.eye(c // power)) / np.sqrt(power)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], c)
    return (signs[:, None] * mixed).astype(np.float32)


def rotate_latents(params: Tree, c: int) -> Tree:
    """The parameters of the same function, whose latents of `c` dims are stored rotated by `rotation(c)`.

    Args:
      params: nested dicts as `mlaflax.checkpoint.model_trees` gives them, layers stacked or not.
    """
    if not isinstance(params, dict):
        return params
    if "kv_down" not in params:
        return {name: rotate_latents(tree, c) for name, tree in params.items()}
    matrix = jnp.asarray(rotation(c))
    weight = params["kv_norm"]["scale"]
    down = params["kv_down"]

    def undo(up):  # [..., h, n, c]
        return jnp.einsum("...hnc,ce->...hne", up * weight[..., None, None, :], matrix)

    return {
        **params,
        "kv_down": jnp.concatenate(
            [jnp.einsum("...dc,ce->...de", down[..., :c], matrix), down[..., c:]], axis=-1
        ),
        "kv_norm": {"scale": jnp.ones_like(weight)},
        "k_up": undo(params["k_up"]),
        "v_up": undo(params["v_up"]),
    }
