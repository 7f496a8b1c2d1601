"""Training with the cache's rounding in its graph: from the start, from a given step, or from another run's weights."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mlaflax import codebook
from mlaflax.checkpoint import load_model
from mlaflax.config import AttentionConfig, ConfigError, MixedConfig
from mlaflax.decode import Engine, EngineConfig, SamplingParams
from mlaflax.formats import GAUSSIAN_CODEBOOK
from tests.train.tiny import MODEL, tiny
from train.loop import train
from train.step import Steps
from train.terminal import Terminal

MIXED = MixedConfig(page=4, window=4, sinks=1, salient=3, probe_stride=2)
WIDE = dataclasses.replace(
    MODEL,
    attention=AttentionConfig(
        num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
)


def quantized(format: str = "mixed", **mixed):
    return dataclasses.replace(WIDE, cache_format=format, mixed=dataclasses.replace(MIXED, **mixed))


def losses(directory) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [values["loss"] for line in lines if "loss" in (values := json.loads(line))]


def test_rounding_begins_after_the_given_step(tmp_path):
    """Up to it the losses are those of exact training, bit for bit, and then they are not."""
    found = {}
    for name, model, begin in (("exact", WIDE, 0), ("late", quantized(), 6), ("early", quantized(), 0)):
        config = tiny(tmp_path, model=model, steps=9, quantize_from=begin, eval_interval=0)
        config = dataclasses.replace(
            config,
            # The same rows for all.
            data=dataclasses.replace(config.data, align=4),
            checkpoint=dataclasses.replace(config.checkpoint, directory=str(tmp_path / name)),
        )
        assert train(config, Terminal())["status"] == "finished"
        found[name] = losses(tmp_path / name)
    assert found["late"][:6] == found["exact"][:6]
    assert all(a != b for a, b in zip(found["late"][6:], found["exact"][6:], strict=True))
    assert found["early"][0] != found["exact"][0]
    assert abs(found["early"][-1] - found["exact"][-1]) < 0.1


@pytest.mark.parametrize("format", ["nuq4", pytest.param("mixed", marks=pytest.mark.slow)])
def test_another_runs_weights_go_on_in_another_cache(format, tmp_path):
    """One flag; the weights are those of the first run, rotated or not, and its codebooks come with them."""
    first = tiny(tmp_path, model=WIDE, steps=4)
    train(first, Terminal())
    levels = GAUSSIAN_CODEBOOK * np.float32(1.1) * np.ones((2, 1), np.float32)
    codebook.save_codebooks(tmp_path / "run", levels, kv_lora_rank=32)
    for rotate in (False, True):
        directory = tmp_path / f"next-{rotate}"
        config = tiny(tmp_path, model=quantized(format, cold="nuq4"), steps=6)
        config = dataclasses.replace(
            config,
            optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-9),
            checkpoint=dataclasses.replace(
                config.checkpoint,
                directory=str(directory),
                initial=str(tmp_path / "run"),
                rotate_latents=rotate,
            ),
        )
        train(config, Terminal())
        before, after = load_model(tmp_path / "run").model, load_model(directory).model
        tokens = np.arange(24)[None] + 5
        exact = [np.asarray(m.simulating(cache_format="f32")(tokens).hidden) for m in (before, after)]
        np.testing.assert_allclose(*exact, atol=2e-3)
        expected = np.tile(GAUSSIAN_CODEBOOK, (2, 1)) if rotate else levels
        np.testing.assert_allclose(after.codebooks(), expected)


def test_codebooks_of_another_model_are_refused(tmp_path):
    train(tiny(tmp_path, model=WIDE, steps=4), Terminal())
    codebook.save_codebooks(tmp_path / "run", np.tile(GAUSSIAN_CODEBOOK, (3, 1)), kv_lora_rank=32)
    with pytest.raises(Exception, match=r"codebook.json: num_layers = 3: must be 2"):
        load_model(tmp_path / "run")


def test_a_quantized_run_is_served_from_the_real_cache(tmp_path):
    train(tiny(tmp_path, model=quantized(), steps=4), Terminal())
    loaded = load_model(tmp_path / "run")
    engine = Engine(loaded.model, loaded.tokenizer, EngineConfig("mixed", max_sequences=2, max_length=48))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [list(range(5, 5 + n)) for n in (3, 20, 30)]
    for prompt, got in zip(prompts, engine.generate(prompts, sampling), strict=True):
        logits = jax.jit(lambda t: loaded.model.logits(loaded.model(t).hidden))(
            np.array([prompt + got.tokens])
        )
        served = np.asarray(logits)[0, len(prompt) - 1 : -1]
        chosen = served[np.arange(8), got.tokens]
        assert (served.max(-1) - chosen < 0.05).all()


def test_documents_begin_at_pages_by_themselves(tmp_path):
    assert tiny(tmp_path, model=quantized()).data.align == 4
    with pytest.raises(ConfigError, match=r"data.align = 6: must be a multiple of model.mixed.page \(4\)"):
        config = tiny(tmp_path)
        data = dataclasses.replace(config.data, sequence_length=30, align=6)
        dataclasses.replace(config, model=quantized(), data=data)


def test_the_step_of_each_kind_is_compiled_once(tmp_path):
    config = tiny(tmp_path, model=quantized())
    steps = Steps(config)
    state = steps.init()
    batch = {name: np.ones((4, 32), np.int32) for name in ("tokens", "targets", "segment_ids", "loss_mask")}
    batch["positions"] = np.tile(np.arange(32, dtype=np.int32), (4, 1))
    compiled = []
    for quantized_now in (False, True, False, True):
        if len(compiled) == 0:
            jax.monitoring.register_event_duration_secs_listener(
                lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
            )
        state, _ = steps.train(state, steps.place(batch), quantized=quantized_now)
        compiled.append(f"after {quantized_now}")
    jax.monitoring.clear_event_listeners()
    assert compiled.index("after True") < len(compiled) - 2
    assert compiled[compiled.index("after True") :] == ["after True", "after False", "after True"]
