"""Mesh and logical-axis rules."""

from mlaflax.sharding.mesh import MESH_AXES, make_mesh
from mlaflax.sharding.rules import RULES, Rules, logical_to_spec, param, state_shardings

__all__ = ["MESH_AXES", "RULES", "Rules", "logical_to_spec", "make_mesh", "param", "state_shardings"]
