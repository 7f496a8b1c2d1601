"""The configurations that come with the project."""

import ast

import jax
import pytest

from mlaflax.checkpoint import Blueprint
from tests.train.tiny import MODEL
from train.cli import CONFIGS, known_configs, load_config
from train.flops import count_parameters, training_flops


@pytest.mark.parametrize("name", known_configs())
def test_loads_and_says_how_to_launch_it(name):
    config = load_config(name)
    doc = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text()))
    assert doc is not None and f"python -m train {name}" in doc and "Expect" in doc
    assert config.checkpoint.directory == f"runs/{name}"


@pytest.mark.parametrize("name", known_configs())
def test_parameters_are_counted_without_making_them(name):
    model = load_config(name).model
    params = Blueprint(model).shapes["params"]
    assert count_parameters(model).total == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # arXiv:2412.19437 and the README_WEIGHTS of the model, which says 36.7 B where the paper says 37 B.
        ("deepseek_v3", 671e9, 36.7e9),
        # arXiv:2405.04434, appendix B: 15.7 B, and 2.4 B active, to two digits.
        ("deepseek_v2_lite", 15.7e9, 2.45e9),
        ("v41_flash", 549e9, 16.5e9),
    ],
)
def test_published_sizes(name, total, active):
    counts = count_parameters(load_config(name).model)
    assert counts.total == pytest.approx(total, rel=0.01)
    assert counts.active == pytest.approx(active, rel=0.01)


def test_flops_agree_with_the_compiler():
    # XLA counts every loop body once: with one layer of each kind there is no difference. It does not know
    # how often the blocks of the experts run, so a dense model is compared.
    import dataclasses

    from mlaflax.model.transformer import init_model

    config = dataclasses.replace(
        MODEL,
        num_layers=1,
        hidden_size=256,
        mlp_size=512,
        vocab_size=1024,
        moe=dataclasses.replace(MODEL.moe, num_experts=0),
    )
    length = 64
    model = init_model(config)
    tokens = jax.ShapeDtypeStruct((1, length), "int32")
    cost = jax.jit(lambda t: model.logits(model(t).hidden)).lower(tokens).compile().cost_analysis()
    assert cost["flops"] == pytest.approx(training_flops(config, length) / 3 * length, rel=0.1)
