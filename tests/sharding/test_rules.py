"""Logical axes, mesh and shardings. Several devices are simulated in a fresh process."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mlaflax.config import ConfigError, MoEConfig
from mlaflax.model.layers import RMSNorm
from mlaflax.model.moe import MoE
from mlaflax.sharding import MESH_AXES, RULES, logical_to_spec, make_mesh, param, state_shardings


def test_names_become_mesh_axes():
    assert logical_to_spec(("vocab", "embed")) == PartitionSpec("tensor", "fsdp")
    assert logical_to_spec(("layers", "expert", "embed", "expert_mlp")) == PartitionSpec(
        None, "expert", "fsdp", "tensor"
    )
    assert logical_to_spec(("batch", "length", None)) == PartitionSpec(
        ("data", "fsdp", "expert"), "context", None
    )


def test_missing_rule_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"'heds' has no sharding rule.*heads"):
        logical_to_spec(("embed", "heds"))


def test_one_mesh_axis_cannot_shard_two_axes():
    with pytest.raises(ConfigError, match=r"'heads' and 'mlp'.*'tensor'"):
        logical_to_spec(("heads", "mlp"))


def test_rules_name_axes_of_the_mesh():
    used = {a for axes in RULES.values() for a in ((axes,) if isinstance(axes, str) else axes or ())}
    assert used == set(MESH_AXES)


def test_param_needs_a_name_per_axis():
    with pytest.raises(ConfigError, match="one name per axis"):
        param(jnp.zeros((2, 3)), "embed")


def test_mesh_on_one_device():
    mesh = make_mesh(data=-1, devices=jax.devices()[:1])
    assert dict(mesh.shape) == dict.fromkeys(MESH_AXES, 1)
    state = nnx.state(RMSNorm(8, 1e-6))
    assert state_shardings(state, mesh).scale.get_value().spec == PartitionSpec("fsdp")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"data=3.*1 devices"),
        ({"data": -1, "fsdp": -1}, "data and fsdp are both -1"),
        ({"tensor": 0}, r"mesh.tensor = 0"),
        ({"fsdp": -1, "tensor": 2}, r"tensor=2.*1 devices"),
    ],
)
def test_mesh_that_does_not_fit(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(**sizes, devices=jax.devices()[:1])


def test_rule_errors_name_the_parameter():
    mesh = make_mesh(devices=jax.devices()[:1])
    config = MoEConfig(num_experts=4, top_k=1, expert_size=8)
    state = nnx.state(MoE(8, config, dtype=jnp.float32, init_std=0.02, rngs=nnx.Rngs(0)))
    rules = {k: v for k, v in RULES.items() if k != "expert_mlp"}
    with pytest.raises(ConfigError, match=r"down.*'expert_mlp' has no sharding rule"):
        state_shardings(state, mesh, rules)
    with pytest.raises(ConfigError, match="mesh axis 'model'"):
        state_shardings(state, mesh, {**RULES, "expert_mlp": "model"})


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from mlaflax.config import ConfigError, MoEConfig
from mlaflax.model.moe import MoE
from mlaflax.sharding import make_mesh, state_shardings

mesh = make_mesh(expert=-1, fsdp=2)
assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "expert": 2, "tensor": 1, "context": 1}
config = MoEConfig(num_experts=4, top_k=2, expert_size=8, num_shared_experts=1)

def build(experts=4):
    c = MoEConfig(num_experts=experts, top_k=2, expert_size=8, num_shared_experts=1)
    make = lambda rngs: MoE(16, c, dtype=jnp.float32, init_std=0.1, rngs=rngs)
    stack = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return nnx.state(nnx.split_rngs(splits=3)(stack)(nnx.Rngs(0)))

abstract = jax.eval_shape(build)
state = jax.jit(build, out_shardings=state_shardings(abstract, mesh))()
gate = state.gate[...]
assert gate.shape == (3, 4, 16, 8), gate.shape
assert {s.data.shape for s in gate.addressable_shards} == {(3, 2, 8, 8)}
assert {s.data.shape for s in state.router[...].addressable_shards} == {(3, 8, 4)}
try:
    state_shardings(jax.eval_shape(lambda: build(3)), mesh)
except ConfigError as error:
    assert "down" in str(error) and "3 does not divide over 2" in str(error), error
else:
    raise AssertionError("3 experts over 2 devices")

# The same layer, sharded and not, gives the same output.
graph = nnx.graphdef(MoE(16, config, dtype=jnp.float32, init_std=0.1, rngs=nnx.Rngs(0)))
x = jax.random.normal(jax.random.key(1), (8, 4, 16))
valid = jnp.ones((8, 4), bool)
run = jax.jit(lambda s: nnx.merge(graph, jax.tree.map(lambda a: a[0], s))(x, valid)[0])
whole = run(jax.device_get(state))
np.testing.assert_allclose(run(state), whole, rtol=0, atol=1e-6)
"""


def test_parameters_are_born_sharded():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
