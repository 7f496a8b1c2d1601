"""One training step and one evaluation step, as pure jitted functions."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mlaflax.checkpoint import Blueprint, model_trees
from mlaflax.model.moe import update_bias
from mlaflax.model.transformer import init_model
from mlaflax.sharding import logical_to_spec
from train.config import TrainConfig
from train.loss import token_losses
from train.optimizer import clip_scale, learning_rate, make_optimizer

Tree = Any
Batch = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that changes from step to step, all of it on the device and all of it saved.

    Attributes:
      params: float32 weights, nested dicts.
      state: expert biases, nested dicts.
      opt_state: of the optimiser; its step count leaves out the steps that were not applied.
      step: batches consumed.
      skipped: steps left out because their loss or gradient was not finite.
      skipped_in_a_row: of these, the ones since the last applied step.
      rng: key data for whatever in training draws at random, folded with `step`.
    """

    params: Tree
    state: Tree
    opt_state: Tree
    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    rng: jax.Array


class Steps:
    """The compiled functions of a run: `init`, `train` and `evaluate`.

    `shapes` is a `TrainState` of `ShapeDtypeStruct`s with shardings: what a checkpoint is restored into.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh | None = None):
        self.config, self.mesh = config, mesh
        self.blueprint = Blueprint(config.model, mesh)
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self._schedule = learning_rate(config.optimizer, config.steps)
        self.shapes = self._shapes()
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes)
        # Pinned: a step whose outputs are placed otherwise than its inputs would be compiled twice.
        self._quantized, self._exact = (
            jax.jit(
                functools.partial(self._train, quantized), donate_argnums=0, out_shardings=(shardings, None)
            )
            for quantized in (True, False)
        )
        self.evaluate: Callable[[Tree, Tree, Batch], tuple[jax.Array, jax.Array]] = jax.jit(self._evaluate)
        self._start = jax.jit(self._rest_of_state, out_shardings=shardings)

    def train(self, state: TrainState, batch: Batch, *, quantized: bool = True) -> tuple[TrainState, dict]:
        """One step, which consumes `state`; not `quantized`, it reads latents as they are."""
        return (self._quantized if quantized else self._exact)(state, batch)

    def init(self) -> TrainState:
        """The state before the first step."""
        trees = model_trees(init_model(self.config.model, self.config.seed, self.mesh))
        return self._start(trees["params"], trees["state"])

    def place(self, batch: dict[str, Any], *names: str | None) -> Batch:
        """Put a host's part of a batch of numpy arrays onto the devices; does not wait for the copy."""
        if self.mesh is None:
            return jax.device_put(batch, jax.local_devices()[0])
        sharding = NamedSharding(self.mesh, logical_to_spec(names or ("batch", "length")))
        return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}

    def _rest_of_state(self, params: Tree, state: Tree) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        rng = jax.random.key_data(jax.random.fold_in(jax.random.key(self.config.seed), 1))
        return TrainState(params, state, self.optimizer.init(params), zero, zero, zero, rng)

    def _shapes(self) -> TrainState:
        params, state = self.blueprint.shapes["params"], self.blueprint.shapes["state"]
        shapes = jax.eval_shape(self._rest_of_state, params, state)
        everywhere = (
            SingleDeviceSharding(jax.local_devices()[0])
            if self.mesh is None
            else NamedSharding(self.mesh, PartitionSpec())
        )

        def placed(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        # Running means lie where their parameters lie.
        opt_state = optax.tree.map_params(
            self.optimizer,
            lambda x, like: placed(x, like.sharding),
            shapes.opt_state,
            params,
            transform_non_params=lambda x: placed(x, everywhere),
        )
        shapes = jax.tree.map(
            lambda x: placed(x, everywhere), shapes._replace(params=(), state=(), opt_state=())
        )
        return shapes._replace(params=params, state=state, opt_state=opt_state)

    def _train(
        self, quantized: bool, old: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        config = self.config
        grads, parts = self._gradients(quantized, old.params, old.state, batch)
        norm = optax.tree.norm(grads)
        scale = clip_scale(norm, config.optimizer.clip_norm)
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = self.optimizer.update(grads, old.opt_state, old.params)
        params = optax.apply_updates(old.params, updates)
        state = self._balance(old.state, parts["expert_load"])

        fine = jnp.isfinite(parts["loss"]) & jnp.isfinite(norm)
        params, state, opt_state = jax.tree.map(
            lambda new, kept: jnp.where(fine, new, kept),
            (params, state, opt_state),
            (old.params, old.state, old.opt_state),
        )
        missed = jnp.where(fine, 0, 1)
        new = TrainState(
            params=params,
            state=state,
            opt_state=opt_state,
            step=old.step + 1,
            skipped=old.skipped + missed,
            skipped_in_a_row=jnp.where(fine, 0, old.skipped_in_a_row + 1),
            rng=old.rng,
        )
        load = parts.pop("expert_load")
        metrics = {
            **parts,
            "grad_norm": norm,
            "learning_rate": self._schedule(old.step - old.skipped),
            "max_load": load.max(-1, initial=0) / jnp.maximum(load.mean(-1), 1),
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
        }
        return new, metrics

    def _gradients(
        self, quantized: bool, params: Tree, state: Tree, batch: Batch
    ) -> tuple[Tree, dict[str, jax.Array]]:
        """Gradients and metrics of the whole batch, one part of it after the other.

        Each part's loss is divided by the tokens of the whole batch, so that the sum over the parts is the
        mean over the batch, however padding is spread.
        """
        parts = self.config.optimizer.accumulation
        total = jnp.maximum(jnp.sum(batch["loss_mask"], dtype=jnp.float32), 1)

        def loss(params, part):
            nll, aux = self._forward(quantized, params, state, part)
            nll = nll / total
            balance = (aux["sequence_loss"] + aux["z_loss"]) / parts
            return nll + balance, {"loss": nll, "balance_loss": balance, "expert_load": aux["expert_load"]}

        gradient = jax.grad(loss, has_aux=True)
        if parts == 1:
            return gradient(params, batch)

        # Rows are dealt out in turn, so that every part is spread over all devices.
        def deal(x):
            return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

        def add(so_far, part):
            return jax.tree.map(jnp.add, so_far, gradient(params, part)), None

        dealt = jax.tree.map(deal, batch)
        shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], dealt))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, start, dealt)[0]

    def _forward(
        self, quantized: bool, params: Tree, state: Tree, batch: Batch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, aux = self._token_losses(quantized, params, state, batch)
        return jnp.sum(losses), aux

    def _token_losses(
        self, quantized: bool, params: Tree, state: Tree, batch: Batch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = self.blueprint.build(params, state)
        if not quantized:
            model = model.simulating(cache_format="f32", rope_format="bf16")
        out = model(batch["tokens"], batch["positions"], batch["segment_ids"])
        with jax.named_scope("loss"):
            losses = token_losses(
                model.logits,
                out.hidden,
                batch["targets"],
                self.config.model.vocab_size,
                self.config.loss_chunk,
            )
        return jnp.where(batch["loss_mask"] != 0, losses, 0), out.aux

    def _balance(self, state: Tree, load: jax.Array) -> Tree:
        step = self.config.model.moe.bias_step
        if not (step and self.config.model.num_moe_layers):
            return state
        moe = state["moe_layers"]["moe"]
        moe = {**moe, "bias": update_bias(moe["bias"], load, step)}
        return {**state, "moe_layers": {**state["moe_layers"], "moe": moe}}

    def _evaluate(self, params: Tree, state: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of -log p(target), and the number of targets."""
        losses, _ = self._token_losses(True, params, state, batch)
        return jnp.sum(losses), jnp.sum(batch["loss_mask"])
