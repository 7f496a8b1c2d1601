"""Checkpoints: what comes back, what is kept, and what is said about damage."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.checkpoint import (
    AnotherModelError,
    Blueprint,
    CheckpointError,
    Checkpoints,
    differences,
    load_model,
    model_trees,
    read_description,
    write_description,
)
from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig, to_dict
from mlaflax.model.transformer import init_model
from mlaflax.tokenizer import Tokenizer

MODEL = ModelConfig(
    vocab_size=280,
    num_layers=2,
    hidden_size=16,
    mlp_size=16,
    max_length=32,
    attention=AttentionConfig(
        num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
    ),
    moe=MoEConfig(num_experts=4, top_k=2, expert_size=8, first_dense=1),
)


class Pair(NamedTuple):
    a: jax.Array
    b: tuple


def trees(value: float = 1) -> dict:
    noise = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    return {
        "model": {"w": jnp.asarray(noise * value), "half": jnp.ones((3,), jnp.bfloat16) * value},
        "training": {
            "opt": Pair(jnp.full((2,), value, jnp.float32), (jnp.zeros((), jnp.int32), ())),
            "empty": {},
        },
    }


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def filled(directory: pathlib.Path, *steps: int, keep: int = 5) -> pathlib.Path:
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, trees(step), {"data": {"at": step}})
        checkpoints.wait()
    return directory


def biggest(directory: pathlib.Path) -> pathlib.Path:
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_everything_comes_back(tmp_path):
    filled(tmp_path, 3)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        found = checkpoints.restore(shapes(trees()))
    assert (found.step, found.meta, found.notes) == (3, {"data": {"at": 3}}, [])
    equal(found.trees, trees(3))


def test_the_newest_are_kept(tmp_path):
    filled(tmp_path, 1, 2, 3, keep=2)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.latest() == 3
        equal(checkpoints.restore(shapes(trees()), 2).trees, trees(2))
        with pytest.raises(CheckpointError, match=r"step = 1: .* it has 2, 3"):
            checkpoints.restore(shapes(trees()), 1)


def test_a_save_holds_its_step_although_training_goes_on(tmp_path):
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    state = {"training": {"w": jnp.zeros((1000, 1000))}}
    with Checkpoints(tmp_path) as checkpoints:
        for number in (1, 2):
            state = step(state)
            checkpoints.save(number, state, {})
            for _ in range(3):
                state = step(state)
        checkpoints.wait()
        for number, value in ((1, 1.0), (2, 5.0)):
            w = checkpoints.restore(shapes(state), number).trees["training"]["w"]
            assert (float(w.min()), float(w.max())) == (value, value)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint: it does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no folder `steps`"):
        load_model(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
            checkpoints.restore(shapes(trees()))
    filled(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="beside it there are run"):
        load_model(tmp_path / "rum")


def test_a_half_written_checkpoint_is_passed_over_and_cleared(tmp_path):
    filled(tmp_path, 1)
    shutil.copytree(tmp_path / "steps" / "1", tmp_path / "steps" / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.latest() == 1
        assert checkpoints.notes == ["ignored the half-written checkpoint of step 2: its save was cut short"]
    assert (tmp_path / "steps" / "2.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert not (tmp_path / "steps" / "2.orbax-checkpoint-tmp").exists()
        found = checkpoints.restore(shapes(trees()))
        assert (found.step, len(found.notes)) == (1, 1)
        checkpoints.save(2, trees(2), {})


def flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x01
    file.write_bytes(data)


def cut(file: pathlib.Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut, pathlib.Path.unlink])
def test_damage_is_found_and_the_one_before_taken(tmp_path, damage):
    filled(tmp_path, 1, 2)
    damage(biggest(tmp_path / "steps" / "2"))
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 in .* is damaged: "):
            checkpoints.restore(shapes(trees()), 2)
        found = checkpoints.restore(shapes(trees()))
        assert found.step == 1
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(shapes(trees()))
        assert found.step == 1
        (note,) = found.notes
        assert "step 2" in note and "damaged" in note and "\n" not in note
        equal(found.trees, trees(1))
        # Training saves that step again.
        checkpoints.save(2, trees(2), {})
        checkpoints.wait()
        equal(checkpoints.restore(shapes(trees())).trees, trees(2))


def test_damage_everywhere(tmp_path):
    filled(tmp_path, 1)
    (tmp_path / "steps" / "1" / "meta" / "metadata").write_text("{")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="no undamaged checkpoint is left"),
    ):
        checkpoints.restore(shapes(trees()))


ABANDONED = """
import os, pathlib, sys, logging
import jax, jax.numpy as jnp
from mlaflax.checkpoint import CheckpointError, Checkpoints
trees = {"model": {str(i): jnp.arange(1000.0) + i for i in range(40)}}
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees)
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, trees, {})
    checkpoints.wait()
files = (p for p in pathlib.Path(sys.argv[1]).rglob("*") if p.is_file())
os.truncate(max(files, key=lambda p: p.stat().st_size), 10)
with Checkpoints(sys.argv[1], read_only=True) as checkpoints:
    try:
        checkpoints.restore(shapes)
    except CheckpointError as error:
        print(error)
logging.getLogger("asyncio").error("heard")
raise ValueError("heard too: Event loop is closed")
"""


def test_reads_abandoned_by_a_damaged_file_are_silent_and_nothing_else_is(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", ABANDONED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "an array cannot be read" in result.stdout
    assert "heard\n" in result.stderr
    assert result.stderr.count("Traceback") == 1 and result.returncode == 1
    assert result.stderr.endswith("ValueError: heard too: Event loop is closed\n")
    assert "RuntimeWarning" not in result.stderr and "never retrieved" not in result.stderr


def test_two_processes_do_not_write_to_one_directory(tmp_path):
    hold = "import sys, mlaflax.checkpoint as c; k = c.Checkpoints(sys.argv[1]); print('open', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(
            CheckpointError, match=rf"another process \(number {other.pid}\): stop it, or name"
        ):
            Checkpoints(tmp_path)
    finally:
        other.kill()
        other.wait()
    # However a process ends, its claim ends with it.
    with Checkpoints(tmp_path), pytest.raises(CheckpointError, match="another process"):
        Checkpoints(tmp_path)
    Checkpoints(tmp_path).close()


def test_another_shape_is_an_error_not_a_guess(tmp_path):
    filled(tmp_path, 1)
    wrong = trees()
    wrong["model"]["w"] = jnp.zeros((200, 301))
    with Checkpoints(tmp_path, read_only=True) as checkpoints, pytest.raises(CheckpointError):
        checkpoints.restore(shapes(wrong), 1)


def test_a_model_of_another_shape_is_not_damage(tmp_path):
    write_description(tmp_path, dataclasses.replace(MODEL, hidden_size=2 * MODEL.hidden_size), None)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, {"model": model_trees(init_model(MODEL))}, {})
        checkpoints.wait()
    message = r"step 7 .* is of another model: model\.params\S+ is \(.*\) in it, \(.*\) by the config.* more arrays\)"
    with pytest.raises(AnotherModelError, match=message):
        load_model(tmp_path)
    # For training, too, which sets damaged checkpoints aside.
    blueprint = Blueprint(dataclasses.replace(MODEL, hidden_size=2 * MODEL.hidden_size))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(AnotherModelError):
        checkpoints.restore({"model": blueprint.shapes})
    assert [p.name for p in (tmp_path / "steps").iterdir()] == ["7"]


def test_load_model_gives_the_model_that_was_saved(tmp_path):
    model = init_model(MODEL, seed=3)
    tokenizer = Tokenizer.train(["some text to learn from"] * 3, 270)
    write_description(tmp_path, MODEL, tokenizer)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, {"model": model_trees(model), "training": {"x": jnp.zeros(3)}}, {})
        checkpoints.wait()
    loaded = load_model(tmp_path)
    assert (loaded.config, loaded.step) == (MODEL, 7)
    assert loaded.tokenizer is not None and loaded.tokenizer.fingerprint == tokenizer.fingerprint
    equal(model_trees(loaded.model), model_trees(model))
    tokens = jnp.array([[1, 2, 3]])
    np.testing.assert_array_equal(
        model.logits(model(tokens).hidden), loaded.model.logits(loaded.model(tokens).hidden)
    )


def test_blueprint_has_the_shapes_of_the_model():
    model = model_trees(init_model(MODEL))
    found = Blueprint(MODEL).shapes
    assert jax.tree.structure(found) == jax.tree.structure(model)
    jax.tree.map(lambda s, x: (s.shape, s.dtype) == (x.shape, x.dtype) or pytest.fail(str(s)), found, model)
    assert found["state"]["moe_layers"]["moe"]["bias"].shape == (1, 4)


def test_descriptions(tmp_path):
    assert read_description(tmp_path) is None
    write_description(tmp_path, MODEL, None)
    content = read_description(tmp_path)
    assert content is not None and content["model"] == to_dict(MODEL)
    (tmp_path / "config.json").write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(CheckpointError, match="format = 99: this version reads format 1"):
        read_description(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1, "mod')
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        read_description(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"format": 1, "model": {"num_layer": 3}}))
    (tmp_path / "steps").mkdir()
    with pytest.raises(CheckpointError, match=r"num_layer is not a field .* did you mean num_layers"):
        load_model(tmp_path)


def test_differences_are_sentences():
    saved = {"model": {"layers": 4, "rope": {"theta": 1.0}}, "paths": ["a"], "gone": 1}
    now = {"model": {"layers": 6, "rope": {"theta": 1.0}}, "paths": ("a",), "new": 2}
    assert differences(saved, now) == [
        "model.layers: 4 saved, 6 now",
        "gone: 1 saved, 'absent' now",
        "new: 'absent' saved, 2 now",
    ]
