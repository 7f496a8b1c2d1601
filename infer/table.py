"""Bytes of a model's cache: this model in every format, beside MHA and GQA of its shape.

Counted from the arrays of an empty cache, everything in them: latents, scales, rope keys, block tables.
MHA and GQA are what the same model would keep without the latent: as many layers, K and V in bfloat16 of
the model's value head dim (neither needs rope dims of its own), for all heads or a quarter of them, in
pages of the same size.

python -m infer table --checkpoint runs/demo --context 131072 --sequences 16
"""

import dataclasses
import json
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from mlaflax.cache import LatentCache
from mlaflax.cache.latent import PAGE_SIZE, default_page_size, pool_format
from mlaflax.checkpoint import Checkpoints, read_model_config
from mlaflax.cli import Terminal
from mlaflax.config import (
    CacheFormat,
    ConfigError,
    GQAConfig,
    ModelConfig,
    require_cache_format,
    require_positive,
)
from mlaflax.formats import get_format

# Larger caches are counted from their arrays' shapes and not allocated.
ALLOCATE_UP_TO = 1 << 30


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Whose cache to count.

    Attributes:
      checkpoint: directory of a training run; only its configuration is read.
      context: tokens per sequence.
      sequences: sequences in the cache.
      json: print one JSON object on stdout in place of the table.
    """

    checkpoint: str
    context: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the model's)")
    ] = None
    sequences: int = 1
    json: bool = False

    def __post_init__(self):
        require_positive(self, "", "sequences")
        if self.context is not None:
            require_positive(self, "", "context")


class Row(NamedTuple):
    """One kind of cache.

    Attributes:
      name: as it is shown.
      bytes_per_token: of one more token over all layers, without tables. The 8-bit copies of a mixed cache, whose
        number does not grow with the context, count in `bytes` alone.
      bytes: of all arrays at the asked-for context.
      allocated: whether those arrays were made and measured; False where only their shapes were.
    """

    name: str
    bytes_per_token: float
    bytes: int
    allocated: bool


def run(arguments: Arguments, terminal: Terminal) -> int:
    with Checkpoints(arguments.checkpoint, read_only=True):
        pass  # says what is wrong with the directory, before anything else does
    config = read_model_config(arguments.checkpoint)
    context = arguments.context or config.max_length
    rows = cache_table(config, context, arguments.sequences)
    if arguments.json:
        print(json.dumps(as_json(rows, context, arguments.sequences)), flush=True)
    else:
        Console().print(render(rows, context, arguments.sequences))
    return 0


def cache_table(config: ModelConfig, context: int, sequences: int = 1) -> list[Row]:
    """MHA, GQA and each format of the model's own cache, for `sequences` of `context` tokens each.

    A format that cannot hold the model's latents is left out.
    """
    heads = config.attention.num_heads
    own = "K/V" if isinstance(config.attention, GQAConfig) else "MLA"
    groups = gqa_groups(heads)
    rows = [
        _measure(f"MHA {heads} x {config.attention.v_head_dim} bf16", config, context, sequences, heads),
        _measure(f"GQA {groups} x {config.attention.v_head_dim} bf16", config, context, sequences, groups),
    ]
    for name in typing.get_args(CacheFormat):
        if _fits(name, config):
            rows.append(_measure(f"{own} {name}", config, context, sequences, name))
    return rows


def _fits(name: str, config: ModelConfig) -> bool:
    try:
        fmt = get_format(pool_format(config, name))
        fmt.parts(*config.attention.cache_dims)
        require_cache_format(name, "bf16", config.attention)
    except ConfigError:
        return False
    return True


def gqa_groups(heads: int) -> int:
    """The divisor of `heads` nearest to a quarter of them, the smaller of two."""
    return min((d for d in range(1, heads + 1) if heads % d == 0), key=lambda d: (abs(d - heads / 4), d))


def _measure(name: str, config: ModelConfig, context: int, sequences: int, kind: int | str) -> Row:
    def create(context: int) -> Any:
        if isinstance(kind, str):
            return LatentCache.create(config, kind, num_sequences=sequences, max_length=context)
        pages = -(-context // PAGE_SIZE)
        shape = (config.num_layers * sequences * pages, PAGE_SIZE, kind, config.attention.v_head_dim)
        table = jnp.zeros((sequences, pages), jnp.int32)
        return {"k": jnp.zeros(shape, jnp.bfloat16), "v": jnp.zeros(shape, jnp.bfloat16), "table": table}

    expected = _nbytes(_shapes(create, context))
    allocated = expected <= ALLOCATE_UP_TO
    measured = _nbytes(create(context)) if allocated else expected
    # Tables take 4 bytes a page: what a page adds beyond its tokens.
    tokens = default_page_size(config, kind) if isinstance(kind, str) else PAGE_SIZE
    page = _nbytes(_shapes(create, 2 * tokens)) - _nbytes(_shapes(create, tokens)) - 4 * sequences
    return Row(name, page / (tokens * sequences), measured, allocated)


def _shapes(create: Callable[[int], Any], context: int) -> Any:
    return jax.eval_shape(lambda: create(context))


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def as_json(rows: list[Row], context: int, sequences: int) -> dict[str, Any]:
    return {"context": context, "sequences": sequences, "caches": [row._asdict() for row in rows]}


def render(rows: list[Row], context: int, sequences: int) -> Table:
    """The rows as a `rich` table; ratios are to the MHA and GQA rows."""
    mha, gqa = rows[0].bytes, rows[1].bytes
    table = Table(
        title=f"cache of {sequences} x {context:,} tokens",
        caption="~ counted from shapes, not allocated" if not all(row.allocated for row in rows) else None,
    )
    for heading in ("cache", "bytes/token", "bytes", "of MHA", "of GQA"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.bytes_per_token:,.0f}",
            f"{'' if row.allocated else '~'}{row.bytes:,}",
            f"{row.bytes / mha:.1%}",
            f"{row.bytes / gqa:.1%}",
        )
    return table
