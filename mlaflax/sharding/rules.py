"""Logical axis names, and the one table that maps them to mesh axes.

Modules name the axes of their parameters (`param`); nothing else in a module knows about meshes.
`state_shardings` turns the names into shardings, the `out_shardings` of the jit that creates the model,
so that no parameter ever exists unsharded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlaflax.config import ConfigError

MeshAxes = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxes]
V = TypeVar("V", bound=nnx.Variable)

RULES: Rules = {
    # Activations.
    "batch": ("data", "fsdp", "expert"),
    "length": "context",
    # Parameters.
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "q_lora": None,
    "kv_lora": None,
    "mlp": "tensor",
    "expert": "expert",
    "expert_mlp": "tensor",
    # The router's view of the experts: every device scores all of them.
    "router": None,
    "codebook": None,
    "layers": None,
}


def param(value: jax.Array, *names: str, kind: type[V] = nnx.Param) -> V:
    """A variable that holds `value` and the logical name of each of its axes.

    flax would place the value at once, which needs a mesh and sees names as mesh axes. We place it later,
    with `state_shardings`, hence `eager_sharding=False`: without a mesh nothing happens. Under
    `jax.set_mesh`, flax functions that read the names (`nnx.eval_shape`, `nnx.get_partition_spec`) need
    `nnx.logical_axis_rules(tuple(RULES.items()))` around them.

    Raises:
      ConfigError: there is not one name for each axis.
    """
    if len(names) != value.ndim:
        raise ConfigError(f"axis names {names} do not fit an array of shape {value.shape}: one name per axis")
    return kind(value, out_sharding=names, eager_sharding=False)


def logical_to_spec(names: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
    """The `PartitionSpec` of an array whose axes have these logical names; None is an unsharded axis.

    Raises:
      ConfigError: a name has no rule, or two axes of the array map to the same mesh axis.
    """
    axes: list[MeshAxes] = []
    owner: dict[str, str] = {}
    for name in names:
        if name is None:
            axes.append(None)
            continue
        if name not in rules:
            raise ConfigError(
                f"logical axis {name!r} has no sharding rule; rules exist for {', '.join(rules)}"
            )
        axis = rules[name]
        for mesh_axis in (axis,) if isinstance(axis, str) else axis or ():
            if mesh_axis in owner:
                raise ConfigError(
                    f"logical axes {owner[mesh_axis]!r} and {name!r} of one array both map to "
                    f"mesh axis {mesh_axis!r}"
                )
            owner[mesh_axis] = name
        axes.append(axis)
    return PartitionSpec(*axes)


def state_shardings(state: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """A tree like `state` (an `nnx.State` of arrays or `ShapeDtypeStruct`s) with a `NamedSharding` per variable.

    A variable without axis names is replicated.

    Raises:
      ConfigError: a name has no rule, a rule names a mesh axis that `mesh` lacks, or an axis does not divide
        by the mesh axes it is sharded over. The message names the parameter.
    """

    def place(path, variable: nnx.Variable):
        where = ".".join(str(getattr(key, "key", key)) for key in path)
        names = variable.get_metadata().get("out_sharding")
        try:
            spec = logical_to_spec(names or (), rules)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for dim, axis in zip(variable.shape, spec, strict=False):
            parts = 1
            for mesh_axis in (axis,) if isinstance(axis, str) else axis or ():
                if mesh_axis not in mesh.shape:
                    raise ConfigError(f"{where}: mesh axis {mesh_axis!r} is not among {tuple(mesh.shape)}")
                parts *= mesh.shape[mesh_axis]
            if dim % parts:
                raise ConfigError(f"{where}: an axis of {dim} does not divide over {parts} devices ({axis})")
        return variable.replace(NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
