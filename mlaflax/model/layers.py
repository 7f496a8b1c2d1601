"""The small modules every layer is made of: RMSNorm and the SwiGLU MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mlaflax.sharding import param


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
    """Float32 weights drawn from a normal distribution with mean 0 and deviation `std`."""
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)


def rms_normalize(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """`x / sqrt(mean(x^2) + eps)` over the last axis (arXiv:1910.07467), in float32, in `x`'s dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS normalisation with a weight: `rms_normalize(x) * scale`.

    Computed in float32 and rounded once, to the dtype of the input. `axis` is the logical name of the
    normalised axis.
    """

    def __init__(self, size: int, eps: float, *, axis: str = "embed"):
        self.scale = param(jnp.ones((size,), jnp.float32), axis)
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return (rms_normalize(x.astype(jnp.float32), self.eps) * self.scale[...]).astype(x.dtype)


class SwiGLU(nnx.Module):
    """Gated MLP, `(silu(x gate) * (x up)) down` (arXiv:2002.05202).

    Weights are float32, `gate` and `up` `[d, f]`, `down` `[f, d]`; products are taken and returned in `dtype`.
    """

    def __init__(self, hidden_size: int, width: int, *, dtype: jnp.dtype, init_std: float, rngs: nnx.Rngs):
        self.gate = param(normal(rngs, (hidden_size, width), init_std), "embed", "mlp")
        self.up = param(normal(rngs, (hidden_size, width), init_std), "embed", "mlp")
        self.down = param(normal(rngs, (width, hidden_size), init_std), "mlp", "embed")
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x = x.astype(self.dtype)
        gate, up, down = (w[...].astype(self.dtype) for w in (self.gate, self.up, self.down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down
