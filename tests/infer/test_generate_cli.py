import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from infer.__main__ import COMMANDS, main
from infer.generate import Arguments, fit_engine, latency
from mlaflax.checkpoint import load_model
from mlaflax.config import ModelConfig
from mlaflax.decode import Engine, EngineConfig, SamplingParams
from tests.train.tiny import MODEL, ROOT


def program(checkpoint, *flags: str) -> list[str]:
    return [sys.executable, "-m", "infer", "generate", "--checkpoint", str(checkpoint), *flags]


def test_a_batch_as_json(checkpoint, environment, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("it was a large old\n")
    flags = ["--prompt", "the cat sat", "--prompt", "a", "--prompt-file", str(file)]
    flags += ["--temperature", "0", "--cache", "fp8", "--logprobs", "3", "--max-length", "256", "--json"]
    done = subprocess.run(
        program(checkpoint, *flags, "--max-tokens", "12"),
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    model, tokenizer, config, step = load_model(checkpoint)
    engine = Engine(model, tokenizer, EngineConfig(cache_format="fp8", max_sequences=1, max_length=256))
    prompts = ["the cat sat", "a", "it was a large old"]
    expected = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, logprobs=3))
    assert [c["prompt"] for c in report["completions"]] == prompts
    for got, want in zip(report["completions"], expected, strict=True):
        assert got["prompt_tokens"] == len(tokenizer.encode(got["prompt"]))
        assert (got["tokens"], got["text"], got["finish_reason"]) == (
            want.tokens,
            want.text,
            want.finish_reason,
        )
        np.testing.assert_allclose([t["logprob"] for t in got["logprobs"]], want.logprobs, atol=1e-4)
        for token in got["logprobs"]:
            # Greedy: the chosen token is the first alternative.
            assert token["top"][0]["id"] == token["id"] and len(token["top"]) == 3

    assert (report["status"], report["step"]) == ("finished", step)
    assert report["tokens"] == sum(len(c.tokens) for c in expected)
    assert report["ttft_seconds"] > 0 and report["tokens_per_second"] > 0
    assert report["inter_token_seconds_p95"] >= report["inter_token_seconds_median"] > 0
    # fp8: a byte per latent dim, a float32 scale per 128 of them, two bytes per rope dim; 2 layers.
    per_token = config.num_layers * (16 + 4 + 2 * 8)
    cache = report["cache"]
    assert cache["bytes_per_token"] == per_token
    assert cache["tokens"] == 3 * 256
    assert cache["bytes_allocated"] == 3 * 256 * per_token + 3 * 2 * 4


@pytest.fixture
def generate(checkpoint, capsys):
    """Runs the program in this process; returns stdout and stderr."""

    def run(*flags: str) -> tuple[str, str]:
        assert main(["generate", "--checkpoint", str(checkpoint), *flags]) == 0
        return capsys.readouterr()

    return run


def test_text_streams_and_stops(generate):
    flags = [
        "--prompt",
        "the cat",
        "--max-length",
        "4096",
        "--ignore-eos",
        "--max-tokens",
        "40",
        "--seed",
        "1",
    ]
    whole, said = generate(*flags)
    text = whole.removesuffix("\n")
    assert len(text) > 40
    for figure in (
        "40 generated",
        "first token",
        "median",
        "p95",
        "tokens/s",
        "bytes allocated",
        "bytes per token",
    ):
        assert figure in said
    stop = text[30:34]
    stopped, said = generate(*flags, "--stop", stop, "--stop", "never comes")
    assert stopped.removesuffix("\n") == text[: text.index(stop)]
    assert "ended by: stop" in said


def test_several_prompts_are_labelled(generate):
    flags = [part for prompt in ("the dog", "a", "it") for part in ("--prompt", prompt)]
    flags += ["--cache", "fp8", "--max-length", "256", "--max-tokens", "5", "--ignore-eos", "--logprobs", "1"]
    shown, _ = generate(*flags)
    for index, prompt in enumerate(("the dog", "a", "it")):
        assert f"[{index + 1}] '{prompt}' (5 tokens, length)\n" in shown
    assert shown.count("log-probabilities") == 3


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_with_what_there_is(checkpoint, environment, stop):
    flags = ["--prompt", "the cat", "--temperature", "0", "--max-length", "4096", "--ignore-eos"]
    running = subprocess.Popen(
        program(checkpoint, *flags, "--max-tokens", "4000"),
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    first = running.stdout.read(30)
    running.send_signal(stop)
    rest, said = running.communicate(timeout=120)
    assert running.returncode == 128 + stop, said
    assert f"stopped by {stop.name}" in said and "tokens/s" in said and "Traceback" not in said
    assert len(first) == 30 and rest.endswith("\n")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(checkpoint, environment):
    flags = ["--prompt", "the", "--max-tokens", "2000", "--ignore-eos", "--max-length", "4096"]
    running = subprocess.Popen(
        program(checkpoint, *flags),
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None and running.stderr is not None
    running.stdout.read(5)
    running.stdout.close()
    said = running.stderr.read()
    assert running.wait(timeout=120) == 141
    assert "Traceback" not in said and "BrokenPipe" not in said


def refused(capsys, *flags: str) -> str:
    """The one sentence that these flags are answered with."""
    assert main(["generate", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and "Traceback" not in err
    return sentence.removeprefix("error: ")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--prompt", ""], "prompt 1 = '': must not be empty"),
        (["--prompt", "a", "--prompt", ""], "prompt 2 = '': must not be empty"),
        ([], "prompt = None: must be given at least once"),
        (["--prompt", "a", "--temperature", "-1"], "temperature = -1.0: must be 0"),
        (["--prompt", "a", "--top-p", "0"], "top_p = 0.0: must lie above 0"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens = 0: must be"),
        (["--prompt", "a", "--logprobs", "21"], "logprobs = 21: must be"),
        (["--prompt", "a", "--cache", "fp7"], "cache = 'fp7': must be one of 'f32', 'bf16', 'fp8'"),
        (["--prompt", "a", "--stop", ""], "stop = ('',): must be"),
        (
            ["--prompt", "a", "--max-length", "5000"],
            "max_length = 5000: must not exceed the model's 4096 tokens",
        ),
        (["--prompt", "the cat sat on the mat", "--max-length", "4"], "must be shorter than the 4 tokens"),
        (["--prompt", "a \udcff"], "must be UTF-8 text"),
        (["--prompt-file", "a\0b"], "prompt_file = 'a\\x00b': must name a file"),
        (["--prompt", "a", "--checkpoint", ""], "checkpoint = '': must name a directory"),
        (["--prompt", "a", "--step", "7"], "step = 7: "),
        (
            ["--temprature", "1"],
            "--temprature is not a flag of python -m infer generate; did you mean --temperature?",
        ),
        (["--prompt", "a", "--max-tokens", "many"], "many"),
        (["--prompt"], "--prompt"),
        (["--prompt", "a", "stray"], "stray"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_sentence(checkpoint, capsys, flags, sentence):
    assert sentence in refused(capsys, "--checkpoint", str(checkpoint), *flags)


def test_a_prompt_file_must_be_there_and_be_text(checkpoint, capsys, tmp_path):
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    flags = ["--checkpoint", str(checkpoint), "--prompt-file"]
    assert "must be UTF-8 text" in refused(capsys, *flags, str(tmp_path / "image"))
    assert main(["generate", *flags, str(tmp_path / "none")]) == 1
    assert "none: no such file" in capsys.readouterr().err


def test_a_checkpoint_must_be_there_and_be_whole(checkpoint, capsys, tmp_path):
    prompt = ["--prompt", "a"]
    assert "it does not exist" in refused(capsys, *prompt, "--checkpoint", str(tmp_path / "nothing"))
    assert "--checkpoint" in refused(capsys, *prompt)

    half = tmp_path / "half"
    shutil.copytree(checkpoint, half)
    steps = sorted(half.glob("steps/*"))
    for step in steps[:-1]:
        shutil.rmtree(step)
    # As a save leaves it that was cut short: under its temporary name, without its parts.
    steps[-1].rename(half / "steps" / f"{steps[-1].name}.orbax-checkpoint-tmp")
    assert "half-written" in refused(capsys, *prompt, "--checkpoint", str(half))

    mute = tmp_path / "mute"
    shutil.copytree(checkpoint, mute)
    (mute / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(capsys, *prompt, "--checkpoint", str(mute))


def test_errors_are_json_too_where_json_is_asked_for(capsys):
    assert main(["generate", "--checkpoint", "x", "--prompt", "", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "status": "error",
        "error": "prompt 1 = '': must not be empty",
    }


def test_commands_explain_themselves(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    assert main([]) == 2
    capsys.readouterr()
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code in (0, None)
        assert "--checkpoint" in capsys.readouterr().out
    assert main(["genrate"]) == 2
    assert "did you mean generate?" in capsys.readouterr().err


def test_latency_is_over_gaps_inside_sequences():
    # Gaps 0.1, 0.1 and 0.4; the 95th percentile lies 0.9 of the way from the second to the third.
    assert latency([[1.0, 1.1, 1.2], [], [3.0, 3.4]]) == {
        "tokens": 5,
        "ttft_seconds": 2.0,
        "inter_token_seconds_median": pytest.approx(0.1),
        "inter_token_seconds_p95": pytest.approx(0.37),
        "tokens_per_second": pytest.approx(5 / 3.4, rel=1e-5),
    }
    assert latency([[]]) == {
        "tokens": 0,
        "ttft_seconds": None,
        "inter_token_seconds_median": None,
        "inter_token_seconds_p95": None,
        "tokens_per_second": None,
    }


def test_the_engine_is_no_larger_than_needed():
    model = ModelConfig(max_length=4096)
    asked = Arguments(checkpoint="runs/x", max_tokens=100)
    assert fit_engine(asked, model, [10]).max_length == 256
    assert fit_engine(asked, model, [200, 3]).max_length == 512
    assert fit_engine(asked, model, [200, 3]).max_sequences == 2
    assert fit_engine(asked, model, [4090]).max_length == 4096
    assert fit_engine(asked, model, [10]).cache_format == model.cache_format == MODEL.cache_format


@pytest.mark.parametrize("program", ["infer", "train"])
@pytest.mark.parametrize("delay", [0.3, 1.0])
def test_ctrl_c_while_starting_prints_no_traceback(environment, program, delay):
    starting = subprocess.Popen(
        [sys.executable, "-m", program, "--help"],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(delay)
    starting.send_signal(signal.SIGINT)
    said = starting.communicate(timeout=60)[1]
    assert "Traceback" not in said
    assert starting.returncode in (0, -signal.SIGINT, 128 + signal.SIGINT)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--checkpoint" in out
    assert not re.findall(r"(--[\w.-]+)(?: [A-Z][\w|]*)?[│ ]*\((?:default|required|repeatable)", out)
