"""Folders become checkpoints and folders again, bit by bit; what is wrong is told before anything is written."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mlaflax.checkpoint import load_model, model_trees
from mlaflax.config import ConfigError, GQAConfig, ModelConfig
from mlaflax.convert import __main__ as program
from mlaflax.convert import from_hf, hf_writer, llama, to_hf
from mlaflax.convert.deepseek import params_from_hf
from mlaflax.convert.hf_folder import INDEX, HFFolder, abbreviated
from mlaflax.convert.layout import flatten
from mlaflax.convert.tensors import model_config_from_hf, pieces
from mlaflax.sharding import make_mesh
from tests.convert.folders import golden_folder, read_folder, to_fp8, write_folder
from tests.parity import golden
from tests.train.tiny import ROOT


def command(capsys, *arguments: object) -> tuple[int, str, str]:
    status = program.main([str(a) for a in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def refused(capsys, *arguments: object, status: int = 2) -> str:
    """The one sentence with which a command ends; its target is not there, nor anything beside it."""
    target = pathlib.Path(str(arguments[2]))
    before = sorted(target.parent.iterdir())
    found, out, said = command(capsys, *arguments)
    assert found == status, said
    assert not out
    assert sorted(target.parent.iterdir()) == before
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and said.rstrip().endswith(lines[0]), said
    return lines[0].removeprefix("error: ")


def held(model) -> dict[str, np.ndarray]:
    trees = model_trees(model)
    return {k: np.asarray(v) for k, v in flatten(trees["params"] | {}).items()} | {
        f"{k}": np.asarray(v) for k, v in flatten(trees["state"]).items()
    }


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


# Round trips


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("v2", "bfloat16"), ("v3", "bfloat16"), ("v3_plain", "float32"), ("v2_lite", "float16")],
)
def test_round_trip_keeps_every_bit(name, dtype, tmp_path, capsys):
    source = golden_folder(tmp_path / "source", name, dtype, files=3, tokenizer=True)
    assert command(capsys, "from-hf", source, tmp_path / "run")[0] == 0
    status, out, _ = command(
        capsys, "to-hf", tmp_path / "run", tmp_path / "back", "--max-shard-size", "300KB", "--json"
    )
    assert status == 0
    there, back = read_folder(source), read_folder(tmp_path / "back")
    assert there == back
    assert not any(p.name.startswith(".") for p in tmp_path.iterdir())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (source / file).read_bytes() == (tmp_path / "back" / file).read_bytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == dtype and config["eos_token_id"] == 257
    assert model_config_from_hf(config) == model_config_from_hf(
        json.loads((source / "config.json").read_text())
    )
    # The index names the file of every tensor, and no file is larger than was asked for.
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["weight_map"].keys() == back.keys()
    sizes = dict.fromkeys(index["weight_map"].values(), 0)
    for tensor, file in index["weight_map"].items():
        sizes[file] += len(back[tensor][2])
    assert sum(sizes.values()) == index["metadata"]["total_size"] == json.loads(out)["bytes_written"]
    assert len(sizes) > 3 and max(sizes.values()) <= 300_000


def test_llama_families_come_back_as_they_were(tmp_path, capsys):
    attention = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True)
    config = ModelConfig(
        vocab_size=320, num_layers=3, hidden_size=64, mlp_size=160, max_length=128, attention=attention
    )
    rng = np.random.default_rng(0)
    weights = {
        piece.name: rng.standard_normal(piece.shape).astype(ml_dtypes.bfloat16)
        for of_ours in pieces(config).values()
        for piece in of_ours
    }
    described = llama.model_config_to_hf(config) | {"dtype": "bfloat16"}
    source = write_folder(tmp_path / "source", described, weights, files=2, tokenizer=True)
    assert command(capsys, "from-hf", source, tmp_path / "run")[0] == 0
    loaded = load_model(tmp_path / "run")
    want = flatten(llama.params_from_hf({k: v.astype(np.float32) for k, v in weights.items()}, config))
    assert same(held(loaded.model), want) and loaded.config == config
    assert command(capsys, "to-hf", tmp_path / "run", tmp_path / "back")[0] == 0
    assert read_folder(source) == read_folder(tmp_path / "back")


def test_every_finite_bfloat16_survives(tmp_path, capsys):
    """Subnormal numbers and minus zero among them."""
    file = golden.load("v2")
    weights = {k: v.astype(ml_dtypes.bfloat16) for k, v in file.weights().items()}
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits[np.isfinite(bits.view(ml_dtypes.bfloat16).astype(np.float32))].view(ml_dtypes.bfloat16)
    filled = []
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "lm_head.weight",
                 "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"):  # fmt: skip
        part, numbers = numbers[: weights[name].size], numbers[weights[name].size :]
        weights[name].reshape(-1)[: part.size] = part
        filled.append(part.size)
    assert not numbers.size and all(filled[:-1])
    source = write_folder(tmp_path / "source", file.config, weights)
    assert command(capsys, "from-hf", source, tmp_path / "run")[0] == 0
    assert command(capsys, "to-hf", tmp_path / "run", tmp_path / "back")[0] == 0
    assert read_folder(source) == read_folder(tmp_path / "back")


def test_read_straight_onto_any_sharding(tmp_path):
    """In small chunks, on meshes that cut experts, heads, widths and the model's axis: the same as all at once."""
    file = golden.load("v3")
    folder, config = from_hf.open_folder(golden_folder(tmp_path, "v3", files=2))
    expected = flatten(params_from_hf(file.weights(), config))
    devices = jax.devices()
    meshes = [None]
    if len(devices) >= 8:
        meshes += [make_mesh(fsdp=2, expert=2, tensor=2, devices=devices[:8])]
    for mesh in meshes:
        model = from_hf.read_model(folder, config, mesh, chunk_bytes=50_000)
        assert same(held(model), expected)


@pytest.mark.slow
def test_sharded_in_a_process_with_eight_devices(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"{__file__}::test_read_straight_onto_any_sharding"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_fp8_is_multiplied_by_its_scales(tmp_path, capsys):
    """Blocks that divide neither axis; the prediction module is named and left out."""
    file = golden.load("v3")
    config, block = file.config, (32, 48)
    weights = to_fp8(file.weights(), block)
    expected = {}
    for name, value in weights.items():
        if name.endswith("_scale_inv"):
            continue
        expected[name] = value.astype(np.float32)
        if (scale := weights.get(f"{name}_scale_inv")) is not None:
            for i, j in np.ndindex(*scale.shape):
                at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                expected[name][at] *= scale[i, j]
    weights |= {
        "model.layers.4.eh_proj.weight": np.zeros((128, 256), np.float32),
        "model.layers.4.mlp.experts.7.up_proj.weight": np.zeros((4, 4), np.float32),
    }
    config = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    source = write_folder(tmp_path / "source", config, weights, files=2)
    folder, ours = from_hf.open_folder(source)
    # Chunks that begin within a block.
    model = from_hf.read_model(folder, ours, chunk_bytes=20_000)
    assert same(held(model), flatten(params_from_hf(expected, ours)))
    status, out, _ = command(capsys, "from-hf", source, tmp_path / "run")
    assert status == 0
    assert "left out (prediction module): model.layers.4.eh_proj.weight, model.layers.4.mlp.experts.7" in out
    assert f"multiplied by their scales: {sum(k.endswith('_scale_inv') for k in weights)} FP8" in out
    assert command(capsys, "to-hf", tmp_path / "run", tmp_path / "back")[0] == 0
    assert {k: x[2] for k, x in read_folder(tmp_path / "back").items()} == {
        k: v.tobytes() for k, v in expected.items()
    }


def test_half_the_bytes_in_bfloat16(tmp_path, capsys):
    source = golden_folder(tmp_path / "source", "v3")
    assert command(capsys, "from-hf", source, tmp_path / "run")[0] == 0
    assert command(capsys, "to-hf", tmp_path / "run", tmp_path / "back", "--dtype", "bfloat16")[0] == 0
    there, back = read_folder(source), read_folder(tmp_path / "back")
    for name, (dtype, shape, data) in back.items():
        was = np.frombuffer(there[name][2], np.float32)
        if name.endswith("e_score_correction_bias"):
            assert (dtype, data) == ("F32", there[name][2])
        else:
            assert (dtype, shape) == ("BF16", there[name][1])
            assert data == was.astype(ml_dtypes.bfloat16).tobytes()


def test_weights_that_outgrew_their_source_are_not_rounded_in_silence(tmp_path, capsys):
    source = golden_folder(tmp_path / "source", "v3")
    assert command(capsys, "from-hf", source, tmp_path / "run")[0] == 0
    path = tmp_path / "run" / "huggingface.json"
    path.write_text(path.read_text().replace("float32", "bfloat16"))
    sentence = refused(capsys, "to-hf", tmp_path / "run", tmp_path / "back")
    assert "model.embed_tokens.weight was bfloat16" in sentence and "--dtype float32" in sentence


def test_the_checkpoint_opens_with_its_tokenizer(tmp_path, capsys):
    source = golden_folder(tmp_path / "source", "v2", "bfloat16", tokenizer=True)
    assert command(capsys, "from-hf", source, tmp_path / "run", "--dtype", "bfloat16")[0] == 0
    model, tokenizer, config, step = load_model(tmp_path / "run")
    assert config.dtype == "bfloat16" and step == 0 and isinstance(model, nnx.Module)
    assert tokenizer is not None and tokenizer.eos_token == "<|pad|>"  # as tokenizer_config.json says


def test_json_summary(tmp_path, capsys):
    source = golden_folder(tmp_path / "source", "v3", files=2)
    status, out, said = command(capsys, "from-hf", source, tmp_path / "run", "--json")
    found = json.loads(out)
    shapes = golden.load("v3").shapes
    assert status == 0 and found["status"] == "done" and "steps" in said
    assert found["parameters"] == sum(int(np.prod(s)) for s in shapes.values())
    assert found["tensors"] == len(shapes) and found["files"] == 2 and found["left_out"] == []
    assert found["bytes_read"] == 4 * found["parameters"] and found["bytes_written"] > 0


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["from-hf", "--help"], ["to-hf", "--help"]], ids=" ".join
)
def test_help(arguments, capsys):
    try:
        status = program.main(arguments)
    except SystemExit as left:
        status = left.code
    assert status == (0 if arguments else 2)
    said = capsys.readouterr().out
    assert "bfloat16" in said or "from-hf" in said


# What is wrong


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> pathlib.Path:
    """A folder of three files with tokenizer; tests damage copies of it."""
    return golden_folder(tmp_path_factory.mktemp("good") / "model", "v3", files=3, tokenizer=True)


NORM = "model.layers.1.self_attn.kv_a_layernorm.weight"
SHARD = "model-00002-of-00003.safetensors"


def edit_config(**changes):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_index(change):
    def edit(folder):
        path = folder / INDEX
        content = json.loads(path.read_text())
        change(content["weight_map"])
        path.write_text(json.dumps(content))

    return edit


def edit_weights(change):
    def edit(folder):
        weights = golden.load("v3").weights()
        change(weights)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        (folder / "tokenizer.json").unlink()
        write_folder(folder, golden.load("v3").config, weights)

    return edit


def cut_short(folder):
    with open(folder / SHARD, "r+b") as file:
        file.truncate(os.path.getsize(folder / SHARD) - 1)


def flip_header(folder):
    with open(folder / SHARD, "r+b") as file:
        file.seek(9)
        file.write(b"\xff\xff")


def link_out(name):
    def edit(folder):
        outside = folder.parent / f"outside-{name}"
        shutil.copyfile(folder / name, outside)
        (folder / name).unlink()
        (folder / name).symlink_to(outside)

    return edit


def pickles_only(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n.")


def more_tokens(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 1258, "content": "<|more|>"})
    content["model"]["vocab"]["<|more|>"] = 1258
    path.write_text(json.dumps(content))


def drop_experts(weights):
    for layer, e in itertools.product((2, 3), range(16)):
        del weights[f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight"]


def fp8_without_scales(weights):
    weights.update(to_fp8(weights, (128, 128)))


BAD = {
    "truncated": (cut_short, f"{SHARD} is damaged or cut short"),
    "damaged header": (flip_header, f"{SHARD} is damaged or cut short"),
    "empty file": (lambda f: (f / SHARD).write_bytes(b""), f"{SHARD} is damaged or cut short"),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"lacks {SHARD}, which {INDEX} names: 1 of 3 files"),
    "pickles": (pickles_only, r"as pickles only (pytorch_model.bin), which can run any code"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "holds no .safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "architecture": (
        edit_config(architectures=["MambaForCausalLM"]),
        "'MambaForCausalLM'], model_type = 'deepseek_v3': must be one of DeepseekV2ForCausalLM",
    ),
    "type": (edit_config(first_k_dense_replace="two"), "config.json"),
    "another width": (
        edit_config(moe_intermediate_size=40),
        "model.layers.2.mlp.experts.0.down_proj.weight has shape [128, 48], [128, 40] by config.json",
    ),
    "more layers": (
        edit_config(num_hidden_layers=5),
        "62 tensors are missing: model.layers.4.input_layernorm.weight, model.layers.4.mlp.experts.{0-15}.down_proj",
    ),
    "fewer layers": (edit_config(num_hidden_layers=3), "tensors are unknown to the configuration: model.layers.3."),
    "lost experts": (
        edit_weights(drop_experts),
        "32 tensors are missing: model.layers.{2-3}.mlp.experts.{0-15}.up_proj.weight",
    ),
    "integers": (
        edit_weights(lambda w: w.update({NORM: w[NORM].astype(np.float16).view(ml_dtypes.bfloat16)[:0]})),
        f"{NORM} has shape [0], [64] by config.json",
    ),
    "FP8 without scales": (edit_weights(fp8_without_scales), "is F8_E4M3, but config.json has no quantization_config"),
    "other quantisation": (
        edit_config(quantization_config={"quant_method": "awq"}),
        "quantization_config.quant_method = 'awq': must be 'fp8'",
    ),
    "index names a path": (
        edit_index(lambda m: m.update({NORM: "../model-00001-of-00003.safetensors"})),
        "'../model-00001-of-00003.safetensors' must be the name of a file in this folder",
    ),
    "index names a pickle": (edit_index(lambda m: m.update({NORM: "x.bin"})), "'x.bin' must be a .safetensors file"),
    "index is wrong": (
        edit_index(lambda m: m.update(more="model-00001-of-00003.safetensors")),
        "says that more is in model-00001-of-00003.safetensors, but it is in none of the files",
    ),
    "shard is a link": (link_out(SHARD), f"{SHARD} is a link to"),
    "tokenizer is a link": (link_out("tokenizer.json"), "tokenizer.json is a link to"),
    "config is a link": (link_out("config.json"), "config.json is a link to"),
    "tokenizer too large": (
        more_tokens,
        "vocabulary = 1259: must not exceed the embedding's 320 rows",
    ),
    "tokenizer damaged": (lambda f: (f / "tokenizer.json").write_text("{}"), "must be a Hugging Face tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_folders(kind, good, tmp_path, capsys):
    damage, message = BAD[kind]
    folder = shutil.copytree(good, tmp_path / "model")
    damage(folder)
    (tmp_path / "there").mkdir()
    sentence = refused(capsys, "from-hf", folder, tmp_path / "there" / "run")
    assert message in sentence, sentence
    assert "\n" not in sentence


def test_links_into_the_hub_cache_are_followed(good, tmp_path):
    """Its snapshots are links into the folder `blobs` two levels up."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(good.iterdir())):
        shutil.copyfile(file, tmp_path / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert len(HFFolder(snapshot).tensors) == len(golden.load("v3").shapes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["from-hf", "nowhere", "out"], "must be a folder with config.json"),
        (["to-hf", "nowhere", "out"], "nowhere holds no checkpoint"),
        (["from-hf", "{good}", "out", "--dtype", "float64"], "float64"),
        (["from-hf", "{good}", "out", "--devices", "99"], "devices = 99: must lie between 1 and"),
        (["from-hf", "{good}", "out", "--dtpye", "float32"], "did you mean --dtype?"),
        (["to-hf", "nowhere", "out", "--max-shard-size", "5XB"], "max_shard_size = '5XB'"),
        (["to-hf", "nowhere", "out", "--max-shard-size", "0GB"], "must be a size above 0"),
        (["form-hf", "a", "out"], "did you mean from-hf?"),
    ],
)
def test_bad_command_lines(arguments, message, good, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *(a.format(good=good) for a in arguments))


def test_nothing_is_overwritten(good, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "mine").write_text("kept")
    assert "must be a new or an empty folder" in refused(capsys, "from-hf", good, out)
    assert "must be a new or an empty folder" in refused(capsys, "to-hf", good, out)
    assert [p.name for p in out.iterdir()] == ["mine"]


def test_sizes():
    assert [to_hf.size_in_bytes(s) for s in ("5GB", "500 mb", "1.5KB", "1000", "7B", "2G")] == [
        5 * 10**9, 5 * 10**8, 1500, 1000, 7, 2 * 10**9]  # fmt: skip
    for wrong in ("", "GB", "-1GB", "1e3", "5XB", "nan"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            to_hf.size_in_bytes(wrong)


def test_names_are_abbreviated_without_lying():
    assert abbreviated([f"a.{i}.b.{j}" for i in (1, 2, 5) for j in range(3)]) == "a.{1-2,5}.b.{0-2}"
    assert abbreviated(["a.1.b.2", "a.2.b.1"]) == "a.{1-2}.b.{1-2} (2 of these)"
    assert abbreviated(["x", "y{}"]) == "x, y{}"
    assert abbreviated([f"{'abcdefghijkl'[i]}" for i in range(10)]).endswith("h and 2 more kinds")


def test_full_disk(good, tmp_path, monkeypatch, capsys):
    """One sentence, and not a file."""
    checkpoint = tmp_path / "run"
    assert command(capsys, "from-hf", good, checkpoint)[0] == 0

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(hf_writer.os, "fsync", full)
        assert "no space left on device" in refused(capsys, "to-hf", checkpoint, tmp_path / "back", status=1)
    with monkeypatch.context() as patch:
        patch.setattr("mlaflax.checkpoint.Checkpoints.wait", lambda self: self._fail())
        patch.setattr("mlaflax.checkpoint.Checkpoints._fail", _full_save, raising=False)
        sentence = refused(capsys, "from-hf", good, tmp_path / "again", status=1)
        assert "no space is left on the disk" in sentence and ".unfinished" not in sentence


def _full_save(checkpoints):
    with checkpoints._save_reported():
        raise OSError(errno.ENOSPC, "No space left on device")


def test_killed_halfway_leaves_no_checkpoint(good, tmp_path, capsys):
    """After a kill there is no OUT, and the next import clears what the first one left."""
    out = tmp_path / "run"
    code = (
        "import os, signal, sys\n"
        "from mlaflax.convert import from_hf, __main__ as program\n"
        "def killed(directory, model, *rest):\n"
        "    (directory / 'steps').mkdir(parents=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "from_hf.save_model = killed\n"
        f"program.main(['from-hf', {str(good)!r}, {str(out)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / ".run.unfinished" / "steps").is_dir()
    assert command(capsys, "from-hf", good, out)[0] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    load_model(out)


def test_interrupted(good, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(from_hf, "save_model", interrupted)
    assert "nothing was written" in refused(capsys, "from-hf", good, tmp_path / "run", status=130)


# Memory


@pytest.mark.slow
def test_memory_beside_the_device(tmp_path):
    """Reading a model of several files takes at most 1.2 times its largest tensor beside the parameters."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.convert.measure_memory", str(tmp_path)],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] > 5 * found["largest"]
    assert found["reading"] <= 1.2 * found["largest"], found
    # Orbax compresses a parameter at a time, and holds it twice meanwhile.
    assert found["saving"] <= found["reading"] + 2.5 * found["largest_parameter"], found
