"""AdamW with its schedule, from `OptimizerConfig`."""

import jax
import optax

from train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step: a linear warm-up, then "cosine" or "wsd" down to `final_ratio` of the peak."""
    peak, last = config.learning_rate, config.learning_rate * config.final_ratio
    warmup = config.warmup_steps
    rest = steps - warmup
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(rest, 1), alpha=config.final_ratio)
    else:
        fall = min(round(config.decay_fraction * steps), rest)
        after = optax.linear_schedule(peak, last, max(fall, 1), transition_begin=rest - fall)
    if warmup == 0:
        return after
    # The first step already moves: it has 1 / warmup of the peak.
    rise = optax.linear_schedule(peak / warmup, peak + peak / warmup, warmup)
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW. Clipping is not part of it: the step needs the norm anyway, and clips by `clip_scale`."""
    return optax.adamw(
        learning_rate(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decayed,
    )


def decayed(params):
    """Which parameters decay: all but the weights of norms."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)


def clip_scale(norm: jax.Array, clip_norm: float) -> jax.Array | float:
    """The factor that brings a gradient of this norm to at most `clip_norm` (0: no clipping)."""
    return jax.numpy.minimum(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
