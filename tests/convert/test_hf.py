"""Hugging Face folders in and out: exact, in little memory, and refused where they are not what they must be."""

import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlaflax.checkpoint import load_model, model_trees
from mlaflax.config import ConfigError, GQAConfig, ModelConfig
from mlaflax.convert import deepseek, hf, llama
from mlaflax.convert.__main__ import main
from mlaflax.convert.hf_folder import INDEX, HFFolder
from mlaflax.model import init_model
from mlaflax.tokenizer import Tokenizer
from tests.parity import golden

BF16 = ml_dtypes.bfloat16


def llama_like() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    attention = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True)
    config = ModelConfig(
        vocab_size=300, num_layers=3, hidden_size=64, mlp_size=160, max_length=128, attention=attention
    )
    params = model_trees(init_model(config, seed=1))["params"]
    params = jax.tree.map(lambda x: x + 0.1 * jnp.arange(x.size).reshape(x.shape) / x.size, params)
    return llama.model_config_to_hf(config), llama.params_to_hf(params, config)


def source(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if name == "qwen2":
        return llama_like()
    file = golden.load(name)
    return file.config, file.weights()


def write_folder(
    path: pathlib.Path, config: dict[str, Any], weights: dict[str, np.ndarray], shards: int = 2
) -> pathlib.Path:
    """A folder as it is released: an index and numbered files, or one file."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    placed = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        placed |= dict.fromkeys(names[i::shards], file)
        save_file({n: weights[n] for n in names[i::shards]}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return path


def read_back(path: pathlib.Path) -> dict[str, np.ndarray]:
    return {n: x for file in path.glob("*.safetensors") for n, x in load_file(file).items()}


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and np.array_equal(got[name], value), name


@pytest.mark.parametrize("name", [pytest.param("v2", marks=pytest.mark.slow), "v3", "qwen2"])
def test_in_and_out_again_is_exact(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "PIECE", 1 << 12)  # every tensor in several pieces
    config, weights = source(name)
    folder = write_folder(tmp_path / "theirs", config, weights)
    told = []
    found = hf.from_hf(folder, tmp_path / "ours", advance=told.append)
    assert sorted(told) == sorted(weights) and found.left_out == []
    loaded = load_model(tmp_path / "ours")
    family = llama if name == "qwen2" else deepseek
    expected = hf.flatten_shapes(family.params_from_hf(weights, loaded.config))
    held = hf.flatten_arrays(loaded.model)
    for path, value in expected:
        np.testing.assert_array_equal(held[path], value, err_msg=path)
    hf.to_hf(tmp_path / "ours", tmp_path / "back", shard_bytes=1 << 18)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    assert_same(read_back(tmp_path / "back"), weights)
    again = hf.model_config_from_hf(json.loads((tmp_path / "back" / "config.json").read_text()))
    assert again == loaded.config


def test_bfloat16_weights_come_back_as_they_were(tmp_path):
    config, weights = source("v2_lite")
    weights = {name: x.astype(BF16) for name, x in weights.items()}
    folder = write_folder(tmp_path / "theirs", config, weights, shards=1)
    hf.from_hf(folder, tmp_path / "ours")
    hf.to_hf(tmp_path / "ours", tmp_path / "back", dtype="bfloat16")
    assert_same(read_back(tmp_path / "back"), weights)


def test_fp8_weights_are_multiplied_with_the_scales_of_their_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "PIECE", 1 << 12)
    config, weights = source("v3")
    rng = np.random.default_rng(0)
    stored, expected = {}, {}
    for name, x in weights.items():
        stored[name] = expected[name] = x
        if x.ndim == 2 and "proj" in name:
            # Shapes that are no multiples of 128 have smaller blocks at their ends.
            codes = x.astype(ml_dtypes.float8_e4m3fn)
            grid = rng.uniform(0.5, 2, [-(-n // 128) for n in x.shape]).astype(np.float32)
            wide = np.kron(grid, np.ones((128, 128), np.float32))[: x.shape[0], : x.shape[1]]
            stored[name], stored[name + "_scale_inv"] = codes, grid
            expected[name] = codes.astype(np.float32) * wide
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    folder = write_folder(tmp_path / "theirs", config | {"quantization_config": quantization}, stored)
    hf.from_hf(folder, tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    held = hf.flatten_arrays(loaded.model)
    for path, value in hf.flatten_shapes(deepseek.params_from_hf(expected, loaded.config)):
        np.testing.assert_array_equal(held[path], value, err_msg=path)

    name = next(n for n in stored if n.endswith("_scale_inv"))
    del stored[name]
    shutil.rmtree(folder)
    write_folder(folder, config | {"quantization_config": quantization}, stored)
    with pytest.raises(ConfigError, match="is F8_E4M3: must be a matrix with scales"):
        hf.from_hf(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_prediction_modules_are_left_out_and_named(tmp_path, capsys):
    config, weights = source("v3")
    depth = config["num_hidden_layers"]
    weights[f"model.layers.{depth}.eh_proj.weight"] = np.zeros((8, 16), np.float32)
    weights[f"model.layers.{depth}.enorm.weight"] = np.zeros(8, np.float32)
    folder = write_folder(tmp_path / "theirs", config, weights)
    assert main(["from-hf", str(folder), str(tmp_path / "ours"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["left_out"] == [f"model.layers.{depth}.e{n}.weight" for n in ("h_proj", "norm")]
    assert said["parameters"] > 0 and said["status"] == "finished"


def test_the_tokenizer_and_its_template_are_carried_both_ways(tmp_path):
    config, weights = source("qwen2")
    folder = write_folder(tmp_path / "theirs", config, weights)
    tokenizer = Tokenizer.train(["some words to learn"] * 3, 270)
    tokenizer.save(folder / "tokenizer.json")
    described = {"eos_token": "<|pad|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    hf.from_hf(folder, tmp_path / "ours")
    loaded = load_model(tmp_path / "ours").tokenizer
    assert loaded is not None and loaded.eos_id == tokenizer.pad_id
    hf.to_hf(tmp_path / "ours", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        theirs, back = ((f / name).read_text() for f in (folder, tmp_path / "back"))
        assert back == theirs if name.endswith("jinja") else json.loads(back) == json.loads(theirs)


def test_onto_every_device_of_a_mesh(tmp_path):
    """In a process with four devices: each holds its shard, of the same numbers."""
    config, weights = source("v3")
    folder = write_folder(tmp_path / "theirs", config, weights)
    program = f"""
import numpy as np
from mlaflax.convert import deepseek, hf
from mlaflax.sharding import make_mesh
hf.PIECE = 1 << 12
source = hf.Import({str(folder)!r}, make_mesh(fsdp=2, expert=2))
held = hf.flatten_arrays(source.run())
weights = {{n: source.folder.rows(n, 0, t.shape[0]) for n, t in source.folder.tensors.items()}}
split = 0
for path, value in hf.flatten_shapes(deepseek.params_from_hf(weights, source.config)):
    assert np.array_equal(held[path], value), path
    split += held[path].addressable_shards[0].data.size < held[path].size
assert split > 10, split
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_the_host_holds_little_more_than_the_devices(tmp_path):
    """Anonymous memory while importing grows by less than 1.2 times the largest tensor beyond the parameters."""
    attention = GQAConfig(num_heads=8, num_kv_heads=4, head_dim=64)
    config = ModelConfig(
        vocab_size=65536,
        num_layers=6,
        hidden_size=512,
        mlp_size=4096,
        attention=attention,
        tie_embeddings=True,
    )
    rng = np.random.default_rng(0)
    shapes = {place.theirs: place.rule.their_shape for place in hf.slots(config)}
    weights = {name: rng.standard_normal(shape, np.float32).astype(BF16) for name, shape in shapes.items()}
    folder = write_folder(tmp_path / "theirs", llama.model_config_to_hf(config), weights, shards=4)
    largest = 4 * max(x.size for x in weights.values())
    total = 4 * sum(x.size for x in weights.values())
    del weights
    program = f"""
import threading, time
from mlaflax.convert import hf
def anonymous():
    with open("/proc/self/status") as status:
        return 1024 * int(next(l for l in status if l.startswith("RssAnon")).split()[1])
source = hf.Import({str(folder)!r})
hf.Filling((8, 8), "float32", source._blueprint.shapes["params"]["embed"].sharding).finish()
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)
watching = threading.Thread(target=watch)
watching.start()
model = source.run()
done = True
watching.join()
print(peak - before)
"""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout)
    assert total <= growth <= total + 1.2 * largest, (growth - total) / largest


# --- Refusals ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> pathlib.Path:
    config, weights = source("v2")
    return write_folder(tmp_path_factory.mktemp("sound") / "theirs", config, weights)


def without(name: str):
    return lambda folder: (folder / name).unlink()


def truncated(folder: pathlib.Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    with open(file, "r+b") as content:
        content.truncate(file.stat().st_size - 1)


def garbled(folder: pathlib.Path) -> None:
    with open(folder / "model-00001-of-00002.safetensors", "r+b") as content:
        content.write(b"\xff" * 8)


def described(**changes: Any):
    def change(folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def indexed(**changes: str):
    def change(folder: pathlib.Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(index))

    return change


def reshaped(folder: pathlib.Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2)
    save_file(tensors | {name: tensors[name][:-1]}, file)


def unknown(folder: pathlib.Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(file) | {"model.extra.weight": np.ones(3, np.float32)}, file)
    indexed(**{"model.extra.weight": file.name})(folder)


def linked(folder: pathlib.Path) -> None:
    target = folder.parent / "elsewhere.json"
    (folder / "config.json").rename(target)
    (folder / "config.json").symlink_to(target)


def pickled(folder: pathlib.Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def large_vocabulary(folder: pathlib.Path) -> None:
    words = [f"w{i}x{i * i}" for i in range(3000)]
    Tokenizer.train([" ".join(words)] * 3, 2000).save(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (shutil.rmtree, "no such folder"),
        (without("config.json"), "lacks config.json"),
        (without("model-00002-of-00002.safetensors"), "lacks model-00002-of-00002.safetensors"),
        (without(INDEX), f"must hold model.safetensors, or {INDEX}"),
        (truncated, "must be a whole safetensors file"),
        (garbled, "must be a whole safetensors file"),
        (described(architectures=["MambaForCausalLM"], model_type="mamba"), "must be one of DeepseekV2ForCausalLM"),
        (described(kv_lora_rank=96), "has shape"),
        (described(num_hidden_layers=9), "the weights lack"),
        (described(quantization_config={"quant_method": "gptq"}), "quantization_config.quant_method = 'gptq'"),
        (indexed(**{"model.norm.weight": "../secret.safetensors"}), "leads out of"),
        (indexed(**{"model.ghost.weight": "model-00001-of-00002.safetensors"}), "lacks model.ghost.weight"),
        (reshaped, "has shape"),
        (unknown, "1 tensors that the configuration does not know: model.extra.weight"),
        (linked, "leads out of"),
        (pickled, "holds pickle files (pytorch_model.bin)"),
        (large_vocabulary, "rows of the embedding"),
    ],
)  # fmt: skip
def test_what_is_refused(sound, tmp_path, capsys, damage, sentence):
    folder = tmp_path / "theirs"
    shutil.copytree(sound, folder)
    damage(folder)
    there = sorted(p.name for p in tmp_path.iterdir())
    assert main(["from-hf", str(folder), str(tmp_path / "ours")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and sentence in error
    assert sorted(p.name for p in tmp_path.iterdir()) == there


def test_links_of_the_hubs_own_cache_are_followed(sound, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(sound.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert HFFolder(snapshot).tensors


def test_what_a_killed_conversion_left_is_named(sound, tmp_path, capsys):
    left = tmp_path / ".ours.abc123"
    left.mkdir()
    assert main(["from-hf", str(sound), str(tmp_path / "ours")]) == 0
    assert f"{left} was left by a conversion that was cut short: delete it" in capsys.readouterr().err
    assert left.exists() and (tmp_path / "ours").exists()


def test_nothing_is_left_of_what_could_not_be_written(sound, tmp_path, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    for out, status, sentence in (
        (tmp_path / "there", 2, "exists already"),
        (tmp_path / "no" / "parent", 2, "must be in a directory that exists"),
    ):
        assert main(["from-hf", str(sound), str(out)]) == status
        assert sentence in capsys.readouterr().err

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlaflax.convert.write.write_description", full)
    assert main(["from-hf", str(sound), str(tmp_path / "ours")]) == 1
    assert "no space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["from-hf", str(sound), str(tmp_path / "ours")]) == 0
    monkeypatch.setattr(hf, "save_file", full)
    assert main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 1
    assert "no space left on device" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "there"]
    assert main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--dtype", "int8"]) == 2
    assert "dtype = 'int8': must be one of float32, bfloat16" in capsys.readouterr().err
    assert main(["to-hf", str(tmp_path / "nothing"), str(tmp_path / "back")]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
