"""Folders written by python -m mlaflax.convert mean in transformers what the checkpoint means here. `make parity`."""

import importlib
import json
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlaflax.checkpoint import load_model
from mlaflax.convert import __main__ as program
from mlaflax.convert.hf_folder import INDEX
from mlaflax.model.transformer import Transformer
from tests.convert.folders import TEMPLATE, golden_folder, write_tensors
from tests.parity import golden
from tests.parity.golden import make_documents

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4


def transformers() -> Any:
    return importlib.import_module("transformers")  # here, so that other runs can collect the tests


def load(directory):
    """As a user loads it; nothing may be missing, left over or misshapen."""
    model, report = transformers().AutoModelForCausalLM.from_pretrained(
        directory, dtype="float32", attn_implementation="eager", output_loading_info=True
    )
    wrong = {k: v for k, v in report.items() if v}
    assert not wrong, wrong
    return model.eval()


def theirs(directory, document) -> np.ndarray:
    torch = importlib.import_module("torch")
    with torch.no_grad():
        return load(directory)(torch.from_numpy(document).long()[None]).logits[0].numpy()


def ours(model: Transformer, document) -> np.ndarray:
    return np.asarray(model.logits(model(document[None]).hidden))[0]


@pytest.fixture(scope="module", params=golden.CONFIGS)
def folders(request, tmp_path_factory):
    """A golden model as a folder with tokenizer, the checkpoint made of it, and the folder made of that."""
    root = tmp_path_factory.mktemp(request.param)
    golden_folder(root / "source", request.param, files=2, tokenizer=True)
    assert program.main(["from-hf", str(root / "source"), str(root / "run")]) == 0
    assert program.main(["to-hf", str(root / "run"), str(root / "back"), "--max-shard-size", "1MB"]) == 0
    assert (root / "back" / INDEX).exists()
    return root


@pytest.fixture(scope="module")
def document():
    return make_documents(1, 320, (97,))[0]


def test_the_exported_folder_gives_the_same_logits(folders, document):
    model = load_model(folders / "run").model
    expected = ours(model, document)
    for directory in ("source", "back"):
        assert np.abs(theirs(folders / directory, document) - expected).max() < TOLERANCE
    # The weights are strong enough for all this to matter: attention is far from uniform.
    assert expected.std() > 0.5
    shuffled = np.concatenate([document[-2::-1], document[-1:]])
    assert np.abs(ours(model, shuffled)[-1] - expected[-1]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("mutation", ["weight", "rope", "heads"])
def test_a_mutation_shows(mutation, folders, document, tmp_path):
    """One wrong number, the other rope convention, two heads in each other's place: each moves the logits."""
    weights = {}
    for file in sorted((folders / "back").glob("*.safetensors")):
        weights |= load_file(file)
    config = json.loads((folders / "back" / "config.json").read_text())
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    kv_up = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    if mutation == "weight":
        weights[name][0, 0] += 1
    elif mutation == "heads":
        each = weights[name].shape[0] // config["num_attention_heads"]
        weights[name] = np.roll(weights[name], each, axis=0)
    elif config["architectures"] == ["DeepseekV3ForCausalLM"]:
        config["rope_interleave"] = not config["rope_interleave"]
    else:  # V2 knows one convention: the rows of the rope key in the order of the other
        r = config["qk_rope_head_dim"]
        weights[kv_up][-r:] = weights[kv_up][-r:].reshape(2, r // 2, -1).swapaxes(0, 1).reshape(r, -1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", {k: np.ascontiguousarray(v) for k, v in weights.items()})
    expected = ours(load_model(folders / "run").model, document)
    assert np.abs(theirs(tmp_path, document) - expected).max() > 10 * TOLERANCE


def test_the_tokenizer_is_the_same(folders):
    text = "the cat sat on the mat"
    tokenizer = load_model(folders / "run").tokenizer
    assert tokenizer is not None
    for directory in ("source", "back"):
        found = transformers().AutoTokenizer.from_pretrained(folders / directory)
        assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert found.eos_token_id == tokenizer.eos_id
        assert found.chat_template == TEMPLATE


def test_a_tokenizer_trained_here_loads(folders, tmp_path):
    """Without a tokenizer_config.json, as training saves it."""
    run = shutil.copytree(folders / "run", tmp_path / "run")
    for name in ("tokenizer_config.json", "chat_template.jinja", "huggingface.json"):
        (run / name).unlink()
    assert program.main(["to-hf", str(run), str(tmp_path / "back")]) == 0
    found = transformers().AutoTokenizer.from_pretrained(tmp_path / "back")
    ours_ = load_model(run).tokenizer
    assert ours_ is not None and found.eos_token_id == ours_.eos_id and found.pad_token_id == ours_.pad_id
    assert found.encode("the dog") == ours_.encode("the dog")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["eos_token_id"] == ours_.eos_id


def test_a_folder_that_transformers_wrote_is_read(folders, document, tmp_path):
    """Its own names of keys in config.json, its own split into files."""
    model = load(folders / "source")
    model.save_pretrained(tmp_path / "saved", max_shard_size="1MB")
    assert program.main(["from-hf", str(tmp_path / "saved"), str(tmp_path / "run")]) == 0
    again, before = (load_model(d / "run").model for d in (tmp_path, folders))
    assert np.array_equal(ours(again, document), ours(before, document))
