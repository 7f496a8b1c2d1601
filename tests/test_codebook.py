"""Codebooks: Lloyd-Max against the published levels, what calibration gains, the file."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.codebook import fit_codebook, load_codebooks, save_codebooks
from mlaflax.config import ConfigError
from mlaflax.formats import GAUSSIAN_CODEBOOK, get_format

# Max 1960, table I, 16 levels, for unit Gaussian values: what scaling each block by its rms would ask for.
MAX_1960 = (0.128, 0.388, 0.657, 0.942, 1.256, 1.618, 2.069, 2.733)


def nmse(latents, codebook) -> float:
    read, _ = jax.jit(get_format("nuq4").simulate)(latents, jnp.zeros((*latents.shape[:-1], 2)), codebook)
    return float(jnp.sum(jnp.square(read - latents)) / jnp.sum(jnp.square(latents)))


def gaussian(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((400, 512)).astype(np.float32)


def test_the_gaussian_codebook_is_what_fitting_finds():
    fitted = fit_codebook(gaussian(0))
    assert fitted.dtype == np.float32 and (np.diff(fitted) > 0).all()
    np.testing.assert_allclose(fitted, GAUSSIAN_CODEBOOK, atol=0.05)
    other = gaussian(1)
    ours = nmse(other, GAUSSIAN_CODEBOOK)
    assert abs(nmse(other, fitted) / ours - 1) < 0.01
    # No worse than the published levels, which know nothing of the scale's choice.
    assert ours < nmse(other, np.float32([*(-x for x in MAX_1960[::-1]), *MAX_1960]))


def test_fitting_lowers_the_error_of_what_is_not_gaussian():
    latents = np.random.default_rng(2).exponential(size=(200, 256)).astype(np.float32) - 0.3
    fitted = fit_codebook(latents[:100])
    # Levels that lie on no curve: 0.64.
    assert nmse(latents[100:], fitted) < 0.75 * nmse(latents[100:], GAUSSIAN_CODEBOOK)


def test_each_round_of_fitting_lowers_the_error():
    latents = np.random.default_rng(3).laplace(size=(200, 256)).astype(np.float32)
    errors = [nmse(latents, fit_codebook(latents, iterations)) for iterations in (0, 1, 3, 10)]
    # Scales are chosen among few: a round may lose a trifle of what the one before it gained.
    assert all(after < before * 1.001 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.99 * errors[0]


@pytest.mark.parametrize("latents", [np.zeros((4, 32)), np.ones((4, 32)), np.full((1, 32), 1e-30)])
def test_latents_with_nothing_to_learn_from_leave_an_ascending_codebook(latents):
    fitted = fit_codebook(latents.astype(np.float32))
    assert np.isfinite(fitted).all() and (np.diff(fitted) > 0).all()


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (np.zeros((4, 40)), "attention.kv_lora_rank = 40: must be a multiple of 32"),
        (np.zeros((0, 32)), r"latents = \(0, 32\): must be of shape \[n, c\], not empty"),
        (np.full((2, 32), np.nan), "latents = 'NaN or infinity': must be finite"),
    ],
)
def test_latents_that_cannot_be_fitted_are_refused(latents, message):
    with pytest.raises(ConfigError, match=message):
        fit_codebook(latents)


def levels(layers: int = 3) -> np.ndarray:
    """Ascending, on polynomials of degree 5."""
    x = np.linspace(-1, 1, 16)
    a, b, c = np.random.default_rng(4).uniform(0.1, 1, (3, layers, 1))
    return (a * x + b * x**3 + c * x**5 + 0.05 * x**2).astype(np.float32)


def test_what_is_saved_is_loaded_to_the_bit(tmp_path):
    path = save_codebooks(tmp_path, levels(), kv_lora_rank=64, notes={"text": "some"})
    assert path == tmp_path / "codebook.json" and list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(load_codebooks(tmp_path, num_layers=3, kv_lora_rank=64), levels())
    content = json.loads(path.read_text())
    assert {name: content[name] for name in content if name != "levels"} == {
        "version": 2, "format": "nuq4", "kv_lora_rank": 64, "num_layers": 3, "notes": {"text": "some"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version = 1: must be 2"),
        ({"format": "fp4"}, "format = 'fp4': must be 'nuq4'"),
        ({"kv_lora_rank": 32}, "kv_lora_rank = 32: must be 64"),
        ({"num_layers": 4}, "num_layers = 4: must be 3"),
        ({"levels": levels()[:2].tolist()}, "levels must be 3 lists of 16 numbers"),
        ({"levels": None}, "levels must be 3 lists of 16 numbers"),
        ({"levels": [["a"] * 16] * 3}, "levels must be 3 lists of 16 numbers"),
        ({"levels": [[*range(15), float("nan")]] * 3}, r"levels\[0\] = .*: must be finite"),
        ({"levels": [list(range(16)), [*range(15), 14], list(range(16))]}, r"levels\[1\] = .*: must ascend"),
        ({"levels": [[*range(15), 16]] * 3}, r"levels\[0\] = .*: must lie on a polynomial of degree 5"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_sentence(tmp_path, change, message):
    path = save_codebooks(tmp_path, levels(), kv_lora_rank=64)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as error:
        load_codebooks(tmp_path, num_layers=3, kv_lora_rank=64)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "codebook.json").write_text(text)
    with pytest.raises(ConfigError, match=r"must be JSON|must hold one JSON object"):
        load_codebooks(tmp_path, num_layers=3, kv_lora_rank=64)


def test_levels_that_could_not_be_read_back_are_not_saved(tmp_path):
    for bad, message in (
        (levels()[:, ::-1], "must ascend"),
        (levels() * np.inf, "must be finite"),
        (levels()[:, :8], r"must be of shape \[num_layers, 16\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            save_codebooks(tmp_path, bad, kv_lora_rank=64)
    assert not list(tmp_path.iterdir())
