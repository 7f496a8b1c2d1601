"""The command from end to end on a checkpoint that never trained: report, refusals, interruption."""

import dataclasses
import json
import pathlib
import random
import shutil

import numpy as np
import pytest

from benchmarks import fidelity as benchmark
from infer import evaluate
from infer.__main__ import main
from infer.evaluation import report
from mlaflax.checkpoint import Checkpoints, model_trees, write_description
from mlaflax.config import AttentionConfig, MixedConfig, ModelConfig
from mlaflax.model import init_model
from tests.train.tiny import tiny
from train.data import DataConfig, Document, corpora, prepare

MODEL = ModelConfig(
    vocab_size=400, num_layers=1, hidden_size=32, mlp_size=48, max_length=256,
    mixed=MixedConfig(page=8, window=8, sinks=2, salient=6, probe_stride=4),
    attention=AttentionConfig(
        num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
)  # fmt: skip
WORDS = [
    a + b for a in ("north", "south", "river", "mount", "winter") for b in ("ern", "side", "land", "wood")
]


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> pathlib.Path:
    """A run's directory as training would leave it, with fresh weights."""
    directory = tmp_path_factory.mktemp("evaluated")
    rng = random.Random(0)
    text = directory / "text.jsonl"
    with open(text, "w") as file:
        for _ in range(40):
            file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(60, 200)))}) + "\n")
    data = DataConfig(
        paths=(str(text),), sequence_length=32, held_out_fraction=0.2, cache_dir=str(directory / "cache")
    )
    tokenizer = prepare(data, MODEL.vocab_size).tokenizer
    save(directory / "run", MODEL, tokenizer, tiny(directory, model=MODEL, data=data), init_model(MODEL))
    return directory / "run"


def save(directory, config, tokenizer, training, model) -> None:
    directory.mkdir()
    write_description(directory, config, tokenizer, training)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(3, {"model": model_trees(model)}, {})
        checkpoints.wait()


QUICK = ["--context", "96", "--max-rows", "4", "--lengths", "160", "--depths", "2", "--trials", "1"]


def test_everything_once(made, tmp_path, capsys):
    flags = ["--formats", "mixed:cold=none", "--formats", "mixed", "--speed-context", "32"]
    where = tmp_path / "report"
    assert (
        main(["evaluate", "--checkpoint", str(made), *QUICK, *flags, "--report", str(where), "--json"]) == 0
    )
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result == json.loads((where / "report.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 3)
    assert list(result["variants"]) == ["bf16", "mixed:cold=none", "mixed"]
    assert set(result["ppl"]["variants"]) == set(result["variants"])
    # What can only be simulated has no bytes, no needles and no speed.
    assert result["variants"]["mixed:cold=none"]["bytes_per_token"] is None
    assert set(result["needle"]["variants"]) == {"bf16", "mixed"}
    assert set(result["speed"]["variants"]) == {"f32", "bf16", "mixed"}
    assert len(result["fidelity"]["layers"]) == 1
    assert result["ppl"]["variants"]["mixed"]["far"]["tokens"] == result["ppl"]["rows"] * (95 - 64)
    page = (where / "report.md").read_text()
    for part in (
        "Perplexity, all tokens",
        "Needles found",
        "Tiers of mixed",
        "Decoding",
        "standard error",
        "![needle",
    ):
        assert part in page
    pictures = {p.name for p in where.glob("*.png")}
    assert pictures == {"perplexity.png", "needle-bf16.png", "needle-mixed.png"}
    assert not [p.name for p in where.iterdir() if p.name.startswith(".")]
    assert "fidelity: 4 steps" in said.err


def test_text_of_ones_own_and_a_table(made, tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_text(" ".join(random.Random(1).choices(WORDS, k=120)))
    flags = ["--suites", "ppl", "--formats", "f32", "--text", str(text)]
    assert main(["evaluate", "--checkpoint", str(made), *QUICK, *flags]) == 0
    out = capsys.readouterr().out
    assert "Perplexity, all tokens" in out and "1 documents" in out and "f32" in out
    assert (
        "±" not in out.split("standard error")[0].split("bf16")[1].splitlines()[0]
    )  # of one document there is none


def test_a_named_corpus_that_the_run_did_not_read(made, tmp_path, capsys, monkeypatch):
    words = random.Random(2)
    mine = [Document(f"mine/{i}", " ".join(words.choices(WORDS, k=120))) for i in range(3)]
    monkeypatch.setitem(corpora.CORPORA, "stdlib", lambda _: iter(mine))
    flags = ["--suites", "ppl", "--formats", "f32", "--corpus", "stdlib", "--json"]
    assert main(["evaluate", "--checkpoint", str(made), *QUICK, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "corpus 'stdlib'" and result["ppl"]["documents"] == 3
    # A run that read it is refused.
    other = tmp_path / "other"
    shutil.copytree(made, other)
    description = json.loads((other / "config.json").read_text())
    description["training"]["data"] |= {"paths": [], "corpus": "english"}
    (other / "config.json").write_text(json.dumps(description))
    assert main(["evaluate", "--checkpoint", str(other), *QUICK, "--corpus", "bible"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "error: corpus = 'bible': must be one that the run was not trained on, which is 'english'"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--suites", "pp"], "suites = 'pp': no such suite; did you mean ppl?"),
        (["--formats", "mixed:widow=1"], "'widow' is not a field of mixed; did you mean window?"),
        (["--formats", "fp5"], "no cache format 'fp5'; did you mean fp"),
        (["--context", "257"], "context = 257: must not exceed model.max_length (256)"),
        (["--context", "71"], "context = 71: must be at least 72: 8 windows of 8 tokens and a page of 8"),
        (["--context", "250"], "context = 250: must not exceed the"),
        (["--formats", "mixed:window=32", "--context", "256"], "context = 256: must be at least 264"),
        (["--lengths", "300"], "lengths = 300: must not exceed model.max_length (256)"),
        (["--lengths", "20", "--depths", "2"], "lengths = 20: must be at least"),
        (
            ["--speed-context", "999"],
            "speed_context = 999: must be above 16 and not exceed model.max_length (256)",
        ),
        (["--trials", "0"], "trials = 0: must be greater than 0"),
        (["--max-rows", "-1"], "max_rows = -1: must be 0 or more"),
        (["--text", "/no/such/file"], "no such file"),
        (["--corpus", "stdlb"], "corpus = 'stdlb': no such corpus; did you mean stdlib?"),
        (["--corpus", "bible", "--text", "x"], "corpus = 'bible': must be left out where text is given"),
        (["--step", "7"], "step = 7"),
        (["--depth", "3"], "did you mean --depths?"),
    ],
)
def test_what_is_refused(made, capsys, flags, sentence):
    suites = ["--suites", "needle"] if flags[0] == "--lengths" else []
    quick = [] if flags[-2] == "--context" else ["--context", "96"]
    assert main(["evaluate", "--checkpoint", str(made), *quick, *suites, *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and sentence in error


def test_a_checkpoint_that_does_not_say_what_it_read(made, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(made, other)
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**content, "training": None}))
    assert main(["evaluate", "--checkpoint", str(other), *QUICK]) == 2
    assert "give text it has not seen with --text FILE" in capsys.readouterr().err


def test_weights_that_are_no_numbers(made, tmp_path, capsys):
    model = init_model(MODEL)
    model.embed[...] = model.embed[...] * np.nan
    other = tmp_path / "other"
    shutil.copytree(made, other, ignore=shutil.ignore_patterns("steps"))
    with Checkpoints(other) as checkpoints:
        checkpoints.save(3, {"model": model_trees(model)}, {})
        checkpoints.wait()
    flags = ["--suites", "ppl", "--formats", "f32", "--json"]
    assert main(["evaluate", "--checkpoint", str(other), *QUICK, *flags]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == "error" and "not numbers for 100% of the tokens" in said["error"]


def test_stopped_it_tells_what_it_has(made, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(evaluate._SUITES, "speed", stop)
    flags = ["--suites", "ppl", "--suites", "speed", "--formats", "f32", "--report", str(tmp_path), "--json"]
    assert main(["evaluate", "--checkpoint", str(made), *QUICK, *flags]) == 130
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "interrupted" and "ppl" in result and "speed" not in result
    assert "interrupted" in (tmp_path / "report.md").read_text()


def test_what_is_no_number_is_said_so():
    assert report.plain({"a": [float("nan"), float("inf"), 1.5], 3: (1,)}) == {
        "a": [None, None, 1.5],
        "3": [1],
    }
    assert report.number(float("nan")) == "not finite" and report.number(None) == "-"
    assert report.with_error(0.5, 0.25, 2) == "+0.50 ±0.25"


FIGURES = {
    "perplexity": {"percent": 0.01, "error": 0.01},
    "control": None,
    "cold_share": {"last": 0.7, "mean": 0.84},
    "deleted": {"percent": 5.0, "error": 1.0},
    "needle": {
        "variants": {"mixed": {"lost": 0, "baseline_found": 20, "trials": 21}},
        "chance": {"measured": {2048: 0.0, 4096: 0.01}},
    },
}


def needles(guessed: float = 0.0, **found: int) -> dict:
    return {"needle": {"variants": {"mixed": found}, "chance": {"measured": {2048: guessed}}}}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"perplexity": {"percent": 0.05, "error": 0.01}}, ["perplexity beside bf16 +0.050 ± 0.010 %"]),
        (
            {"perplexity": {"percent": -1.0, "error": 0.03}},
            ["standard error beside bf16 of -1.000 ± 0.030 %"],
        ),
        ({"perplexity": {"percent": 0.0, "error": None}}, ["standard error beside bf16"]),
        ({"perplexity": {"percent": float("nan"), "error": 0.0}}, ["perplexity beside bf16"]),
        ({"control": {"percent": 0.2, "error": 0.01}}, ["perplexity beside the control +0.200"]),
        ({"cold_share": {"last": 0.9, "mean": 0.79}}, ["79.0% of the tokens cold"]),
        ({"deleted": {"percent": 0.9, "error": 0.1}}, ["without cold tokens +0.900"]),
        (needles(lost=1, baseline_found=19, trials=20), ["1 needles lost of 19"]),
        (needles(lost=0, baseline_found=0, trials=20), ["bf16 finds 0.0% of the needles"]),
        (needles(lost=0, baseline_found=189, trials=200), ["bf16 finds 94.5% of the needles"]),
        (needles(0.02, lost=0, baseline_found=20, trials=20), ["bf16 guesses 2.0% of what no text tells"]),
    ],
)
def test_the_benchmark_judges(changes, missed):
    found = benchmark.judge({**FIGURES, **changes})
    assert len(found) == len(missed)
    assert all(got.startswith(want) for got, want in zip(found, missed, strict=True))


@pytest.mark.slow
def test_the_benchmark_measures_what_it_judges(made, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    flags = ["--context", "96", "--rows", "4", "--lengths", "160", "999", "--depths", "2", "--trials", "1"]
    flags += ["--control", str(made), "--needles", str(made), "--json", str(figures)]
    assert benchmark.main(["--checkpoint", str(made), *flags, "--check"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("The mixed cache changes perplexity by ") and "Missed: " in out
    got = json.loads(figures.read_text())
    assert benchmark.judge(got), "weights that never trained find no needle"
    assert got["needle"]["variants"]["mixed"]["trials"] == 2
    # The same weights: beside the control is beside their own bf16.
    assert got["control"]["percent"] == pytest.approx(got["perplexity"]["percent"], abs=1e-3)
    ppl = got["summary"]["variants"]
    assert ppl["mixed"]["far"]["tokens"] == 4 * (95 - 64) == got["perplexity"]["tokens"]
    change = 100 * (ppl["deleted"]["far"]["perplexity"] / ppl["bf16"]["far"]["perplexity"] - 1)
    assert got["deleted"]["percent"] == pytest.approx(change, rel=1e-3)
    assert {"none", "random", "window"} <= set(got) and got["salient"] == MODEL.mixed.salient


def test_the_benchmark_compares_by_document():
    nll = np.array([[1.0, 2.0], [3.0, 4.0]])
    change = benchmark.compare(nll + np.array([[0.1, 0.1], [0.3, 0.3]]), nll, np.array([0, 1]))
    assert change["percent"] == pytest.approx(100 * (np.exp(0.2) - 1))
    assert change["error"] == pytest.approx(100 * np.exp(0.2) * 0.1)
    assert not change["differs"] and benchmark.compare(nll + 0.1, nll, np.array([0, 1]))["differs"]


def test_every_flag_is_explained():
    fields = [field.name for field in dataclasses.fields(evaluate.Arguments)]
    explained = evaluate.Arguments.__doc__ or ""
    assert all(f"\n      {name}: " in explained for name in fields)
