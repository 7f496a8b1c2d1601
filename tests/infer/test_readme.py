"""What the README tells users to type works: its Python runs, its commands run or at least parse."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.convert.folders import golden_folder
from tests.convert.test_gguf import byte_level, write
from tests.convert.test_llama import small
from tests.train.tiny import ROOT
from train.cli import known_configs, parse

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)[3:] for line in lines if line.startswith(f"python -m {program} ")
    ]


def run(arguments: list[str], environment: dict) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_runs(checkpoint, environment):
    (code,) = blocks("python")
    assert "runs/demo" in code
    assert run(["-c", code.replace("runs/demo", str(checkpoint))], environment).strip()


@pytest.mark.parametrize("arguments", commands("infer"), ids=" ".join)
def test_infer_commands_run(arguments, checkpoint, environment):
    arguments = [str(checkpoint) if a == "runs/demo" else a for a in arguments]
    assert str(checkpoint) in arguments
    if "--context" in arguments:  # the tiny model's limit is shorter
        arguments[arguments.index("--context") + 1] = "4096"
    assert run(["-m", "infer", *arguments], environment).strip()


def test_convert_commands_run(tmp_path, environment):
    """In the order in which they stand, on a tiny model in the place of the published one."""
    first, second, third = commands("mlaflax.convert")
    golden_folder(tmp_path / first[1], "v2_lite", tokenizer=True)
    config, weights = small("smollm2", vocab=300)
    write(tmp_path / third[1], config, weights, "llama", tokenizer=byte_level())
    for arguments in (first, second, third):
        place = [arguments[0], *(str(tmp_path / a) for a in arguments[1:])]
        assert "parameters" in run(["-m", "mlaflax.convert", *place], environment)
    generated = ["--checkpoint", str(tmp_path / first[2]), "--prompt", "the cat", "--max-tokens", "4"]
    assert run(["-m", "infer", "generate", *generated], environment)


@pytest.mark.parametrize("arguments", commands("train"), ids=" ".join)
def test_train_commands_are_understood(arguments):
    assert parse(arguments).config


def test_configs_and_make_targets_that_it_names_exist():
    for name in re.findall(r"`(demo_hour|deepseek_\w+|v41_\w+)`", README):
        assert name in known_configs()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m (benchmarks\.\w+)", README):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
