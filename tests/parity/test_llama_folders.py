"""Llama folders that transformers wrote, through our programs and back into transformers: the same logits each way.

`make parity`; needs the parity extra.
"""

import importlib
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlaflax.checkpoint import load_model
from mlaflax.convert.__main__ import main
from mlaflax.tokenizer import Tokenizer
from tests.parity.golden import make_documents, make_weights
from tests.parity.test_live import TOLERANCE
from tests.parity.test_llama_live import FAMILIES

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def transformers():
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def peer():
    return importlib.import_module("tests.parity.transformers_peer")


@pytest.mark.parametrize("name", ["llama 3.1", "qwen2", "qwen3"])
def test_there_and_back(name, peer, transformers, tmp_path):
    config = FAMILIES[name]
    weights = make_weights(peer.shapes(config), 7)
    theirs = tmp_path / "theirs"
    # Written by transformers itself, in several files.
    peer.load_model(config, weights).save_pretrained(theirs, max_shard_size="100KB")
    if config["vocab_size"] >= 270:
        Tokenizer.train(["a few words"] * 2, 270).save(theirs / "tokenizer.json")
    (document,) = make_documents(3, config["vocab_size"], (60,))
    expected = peer.alone(peer.load_model(config, weights), document)

    assert main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    model = load_model(tmp_path / "ours").model
    logits = jax.jit(lambda tokens: model.logits(model(tokens).hidden))
    ours = np.asarray(logits(document[None]))[0]
    assert expected.std() > 0.5
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())

    assert main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--max-shard-size", "100KB"]) == 0
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back",
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    # Rope factors may be spelled otherwise, with the same meaning to the last bits.
    np.testing.assert_allclose(peer.alone(back.eval(), document), expected, atol=1e-5)

    # The comparison would see one wrong matrix.
    (file, *_) = sorted((tmp_path / "back").glob("*.safetensors"))
    held = load_file(file)
    changed = next(n for n in sorted(held) if held[n].ndim == 2 and "embed" not in n)
    save_file(held | {changed: held[changed][::-1].copy()}, file, metadata={"format": "pt"})
    assert main(["from-hf", str(tmp_path / "back"), str(tmp_path / "wrong")]) == 0
    wrong = load_model(tmp_path / "wrong").model
    off = np.asarray(jax.jit(lambda tokens: wrong.logits(wrong(tokens).hidden))(document[None]))[0]
    assert np.abs(off - expected).max() > 100 * TOLERANCE * np.abs(expected).max()


def test_a_tokenizer_opens_in_transformers_again(peer, transformers, tmp_path):
    config = FAMILIES["llama"] | {"vocab_size": 300}
    theirs = tmp_path / "theirs"
    peer.load_model(config, make_weights(peer.shapes(config), 7)).save_pretrained(theirs)
    ours = Tokenizer.train(["a few words, and a few more"] * 2, 290)
    ours.save(theirs / "tokenizer.json")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (theirs / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    assert main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    text = "a few words more"
    assert back(text)["input_ids"] == ours.encode(text)
    said = back.apply_chat_template([{"role": "user", "content": "more"}], tokenize=False)
    assert said == "[user] more"
