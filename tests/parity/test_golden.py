"""The model gives the logits that transformers 5.24 gives, whatever road the tokens take through it.

The float32 noise of transformers against float64 is 1.5e-5 (make_golden.py prints it), and our worst error
2e-5: the tolerance is five times what rounding explains.
"""

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.convert.deepseek import model_config_from_hf, params_from_hf
from mlaflax.model import mla, moe
from tests.parity import golden, numpy_reference
from tests.parity.runner import Runner, build

TOLERANCE = 1e-4
# A wrong formula must be a hundred times further off than the tolerance, or the files would not be worth much.
WRONG = 1e-2

NAMES = list(golden.CONFIGS)
LAYOUTS = ["alone", "left", "right", "packed"]


@functools.cache
def case(name):
    """File, configuration, parameters and the model's runner; shared, as nothing changes them."""
    file = golden.load(name)
    config = model_config_from_hf(file.config)
    params = params_from_hf(file.weights(), config)
    return file, config, params, Runner(build(config, params))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_without_cache(name, layout):
    file, _, _, runner = case(name)
    batch = golden.lay_out(file.documents, layout)
    assert batch.error(runner.logits(batch), file.logits) < TOLERANCE


@pytest.mark.parametrize("layout", ["alone", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_one_go(name, layout):
    file, _, _, runner = case(name)
    batch = golden.lay_out(file.documents, layout)
    assert batch.error(runner.cached_logits(batch), file.logits) < TOLERANCE


@pytest.mark.parametrize("layout", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_ragged_chunks(name, layout):
    """Chunks that straddle the border of a page, and rows of padding only."""
    file, _, _, runner = case(name)
    batch = golden.lay_out(file.documents, layout)
    chunks = [1, 7, 64, 7, 64, 7, 7, 1, 1, 1] if name == "v3" else [1, 53, 53, 53]
    assert batch.error(runner.cached_logits(batch, chunks), file.logits) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    """Documents that end at different steps, or, on the left, begin at different ones."""
    file, _, _, runner = case(name)
    for layout in ("left", "right"):
        batch = golden.lay_out(file.documents, layout)
        steps = [1] * batch.tokens.shape[1]
        assert batch.error(runner.cached_logits(batch, steps), file.logits) < TOLERANCE


def test_token_by_token_unstacked():
    """One module per layer: the form that serves."""
    file, _, _, runner = case("v3")
    batch = golden.lay_out(file.documents, "right")
    steps = [1] * batch.tokens.shape[1]
    unstacked = Runner(runner.model.unstacked())
    assert batch.error(unstacked.cached_logits(batch, steps), file.logits) < TOLERANCE


@pytest.mark.parametrize("layout", ["left", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_numpy_reference(name, layout):
    """Float64 from the same parameters: what separates it from the file is the rounding of transformers."""
    file, config, params, _ = case(name)
    assert _reference_error(config, params, file, layout) < TOLERANCE / 4


# What goes wrong in practice, and must not go unseen: each fault alone must move the logits, or the files
# would prove nothing about it. The cheap reference tries them all, the model itself the notorious ones.


def _reference_error(config, params, file, layout="right", **fields):
    batch = golden.lay_out(file.documents, layout)._replace(**fields)
    got = numpy_reference.forward(params, config, batch.tokens, batch.positions, batch.segment_ids)
    return batch.error(got, file.logits)


def _model_error(config, params, file, layout="right", **fields):
    batch = golden.lay_out(file.documents, layout)._replace(**fields)
    return batch.error(Runner(build(config, params)).logits(batch), file.logits)


def _rope(**changes):
    def change(config):
        rope = dataclasses.replace(config.attention.rope, **changes)
        return dataclasses.replace(config, attention=dataclasses.replace(config.attention, rope=rope))

    return change


def _moe(**changes):
    return lambda config: dataclasses.replace(config, moe=dataclasses.replace(config.moe, **changes))


WRONG_CONFIGS = {
    "mscale in place of mscale_all_dim": ("v2", _rope(mscale_all_dim=1.0)),
    "mscale_all_dim in place of mscale": ("v3_plain", _rope(mscale=0.6)),
    "no temperature": ("v2_lite", _rope(mscale=0.0, mscale_all_dim=0.0)),
    "no YaRN": ("v3", _rope(factor=1.0)),
    "original length": ("v3", _rope(original_length=4096)),
    "half-split rope on V2 weights": ("v2", _rope(convention="half")),
    "half-split rope on interleaved V3 weights": ("v3", _rope(convention="half")),
    "interleaved rope on half-split weights": ("v3_plain", _rope(convention="interleaved")),
    "weights normalised": ("v2_lite", _moe(normalize=True)),
    "weights not normalised": ("v3", _moe(normalize=False)),
    "routed scale": ("v2", _moe(routed_scale=1.0)),
    "groups ignored": ("v3", _moe(num_groups=1, top_groups=1)),
    "group worth its best two": ("v2", _moe(group_score="top2")),
    "group worth its best": ("v3", _moe(group_score="max")),
}


@pytest.mark.parametrize("fault", WRONG_CONFIGS)
def test_wrong_configuration_shows(fault):
    name, change = WRONG_CONFIGS[fault]
    file, config, params, _ = case(name)
    assert _reference_error(change(config), params, file) > WRONG


right_scale = numpy_reference.softmax_scale
WRONG_SCALES = {
    "no temperature": lambda a: a.qk_head_dim**-0.5,
    "temperature not squared": lambda a: right_scale(a) ** 0.5 * a.qk_head_dim**-0.25,
    "inverted": lambda a: 1 / right_scale(a),
    "applied twice": lambda a: right_scale(a) * a.qk_head_dim**-0.5,
    "nope dims only": lambda a: right_scale(a) * (a.qk_head_dim / a.qk_nope_head_dim) ** 0.5,
}


@pytest.mark.parametrize("fault", WRONG_SCALES)
@pytest.mark.parametrize("name", ["v2", "v3_plain"])
def test_wrong_softmax_scale_shows(name, fault, monkeypatch):
    file, config, params, _ = case(name)
    monkeypatch.setattr(numpy_reference, "softmax_scale", WRONG_SCALES[fault])
    assert _reference_error(config, params, file) > WRONG


@pytest.mark.parametrize("name", ["v3", "v3_plain"])
def test_lost_expert_bias_shows(name):
    file, config, params, _ = case(name)
    layers = params["moe_layers"]
    no_bias = {**layers["moe"], "bias": np.zeros_like(layers["moe"]["bias"])}
    assert _reference_error(config, {**params, "moe_layers": {**layers, "moe": no_bias}}, file) > WRONG


@pytest.mark.parametrize("name", NAMES)
def test_wrong_epsilon_shows(name):
    """The model's epsilon in the norms of the latents."""
    file, config, params, _ = case(name)
    attention = dataclasses.replace(config.attention, latent_norm_eps=config.norm_eps)
    config = dataclasses.replace(config, attention=attention)
    assert _reference_error(config, params, file) > WRONG


@pytest.mark.parametrize("layout", ["left", "packed"])
@pytest.mark.parametrize("name", ["v2_lite", "v3"])
def test_ignored_segments_show(name, layout):
    """Padding, or another document, that can be attended to."""
    file, config, params, _ = case(name)
    ones = np.ones_like(golden.lay_out(file.documents, layout).segment_ids)
    assert _reference_error(config, params, file, layout, segment_ids=ones) > WRONG


@pytest.mark.parametrize(
    "fault", ["mscale in place of mscale_all_dim", "half-split rope on interleaved V3 weights", "no YaRN"]
)
def test_model_with_wrong_configuration(fault):
    name, change = WRONG_CONFIGS[fault]
    file, config, params, _ = case(name)
    assert _model_error(change(config), params, file) > WRONG


def test_model_with_wrong_softmax_scale(monkeypatch):
    file, config, params, _ = case("v2_lite")
    monkeypatch.setattr(mla, "softmax_scale", WRONG_SCALES["applied twice"])
    assert _model_error(config, params, file) > WRONG


def test_model_masking_losing_groups_with_zero(monkeypatch):
    """A biased score can be negative, and 0 beats it."""
    file, config, params, _ = case("v3")
    # The only infinity in that module is the mask.
    monkeypatch.setattr(moe, "jnp", types.SimpleNamespace(**{**vars(jnp), "inf": 0.0}))
    assert _model_error(config, params, file) > WRONG


def test_model_ignoring_segments():
    file, config, params, _ = case("v2")
    ones = np.ones_like(golden.lay_out(file.documents, "left").segment_ids)
    assert _model_error(config, params, file, "left", segment_ids=ones) > WRONG
