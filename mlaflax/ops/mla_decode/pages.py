"""Reading pages of the pool, and which of their keys a query may see: shared by the implementations."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mlaflax.formats import Format


def read_pages(
    pool: Mapping[str, Array], ids: Int[Array, "b p"], format: Format
) -> tuple[Float[Array, "b k c"], Float[Array, "b r k"]]:
    """Latents (row per token) and rope keys (column per token) of those pages, unpacked to float32.

    Unused entries (negative ids) read page 0; `visible_keys` hides them.
    """
    ids = jnp.maximum(ids, 0)
    b, p = ids.shape
    t = pool["rope"].shape[-1]
    latent, rope = {}, {}
    for name, array in pool.items():
        if name == "codebook":
            latent[name] = array
            continue
        part = jnp.take(array, ids, axis=0, mode="clip")  # [b, p, t, size] or [b, p, size, t]
        if name.startswith("rope"):
            rope[name] = jnp.swapaxes(part, 1, 2).reshape(b, -1, p * t)
        else:
            part = part if name == "latent" else jnp.swapaxes(part, -1, -2)
            latent[name] = part.reshape(b, p * t, -1)
    return format.unpack_latent(latent), format.unpack_rope(rope)


def visible_keys(
    q_pos: Int[Array, "b q"],
    page_pos: Int[Array, "b p"],
    mask: Bool[Array, "b p t"] | None,
    *,
    page_size: int,
) -> Bool[Array, "b q k"]:
    """Keys at positions 0 <= key <= q_pos of used pages whose mask bit, if there is one, is set."""
    b, p = page_pos.shape
    key_pos = page_pos[..., None] + jnp.arange(page_size, dtype=page_pos.dtype)
    allowed = jnp.broadcast_to(page_pos[..., None] >= 0, key_pos.shape)
    if mask is not None:
        allowed &= mask
    key_pos, allowed = key_pos.reshape(b, 1, p * page_size), allowed.reshape(b, 1, p * page_size)
    return allowed & (key_pos <= q_pos[..., None])


def last_live_page(q_pos: Int[Array, "b q"], page_pos: Int[Array, "b p"]) -> Int[Array, ""]:
    """One more than the index of the last entry of the tables that some query can see; 0 where none can."""
    live = (page_pos >= 0) & (page_pos <= jnp.max(q_pos, axis=1, keepdims=True))
    return jnp.max(jnp.where(live, jnp.arange(1, page_pos.shape[1] + 1), 0))
