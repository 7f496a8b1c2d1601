"""How caches to compare are spelled, and what is refused."""

import dataclasses

import pytest

from infer.evaluation.variants import far_from, parse_variant, parse_variants
from mlaflax.config import AttentionConfig, ConfigError, MixedConfig, ModelConfig

CONFIG = ModelConfig(
    max_length=2048,
    attention=AttentionConfig(num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8),
    mixed=MixedConfig(salient=28),
)


def test_fields_left_out_are_the_checkpoints():
    variant = parse_variant("mixed:hot=fp8,cold=nuq4,window=256,rope=fp8", CONFIG)
    assert (variant.cache_format, variant.rope_format) == ("mixed", "fp8")
    assert variant.mixed == MixedConfig(hot="fp8", cold="nuq4", window=256, salient=28)
    assert parse_variant("fp4:rope=fp8", CONFIG).rope_format == "fp8"
    trained = dataclasses.replace(CONFIG, cache_format="fp8", rope_format="fp8")
    assert [parse_variant(n, trained).rope_format for n in ("fp8", "mixed", "bf16", "f32")] == [
        "fp8",
        "fp8",
        "bf16",
        "bf16",
    ]


def test_the_baseline_comes_first_and_each_once():
    assert [v.name for v in parse_variants(["fp8", "bf16", "fp8", "f32"], CONFIG)] == ["bf16", "fp8", "f32"]
    assert [v.name for v in parse_variants([], CONFIG)] == [
        "bf16",
        "f32",
        "fp8",
        "int8",
        "fp4",
        "nuq4",
        "mixed",
    ]
    odd = dataclasses.replace(CONFIG, attention=dataclasses.replace(CONFIG.attention, kv_lora_rank=16))
    assert [v.name for v in parse_variants([], odd)] == ["bf16", "f32", "fp8", "int8"]


@pytest.mark.parametrize(
    ("spelled", "sentence"),
    [
        ("fp9", "formats = 'fp9': no cache format 'fp9'; did you mean fp8?"),
        ("fp8:", "formats = 'fp8:': must name a field after the colon"),
        ("fp8:window=128", "formats = 'fp8:window=128': 'window' is not a field of fp8; there are rope"),
        ("mixed:widow=1", "'widow' is not a field of mixed; did you mean window?"),
        ("mixed:window", "must give 'window' a value"),
        ("mixed:window=x", "window must be a whole number, 0 or more"),
        ("mixed:window=100", "mixed.window = 100: must be a multiple of mixed.page (128)"),
        ("mixed:window=2048", "mixed.window = 2048: must be below max_length (2048)"),
        ("mixed:hot=fp4", "mixed.hot = 'fp4': must be one of 'f32', 'bf16', 'fp8', 'int8'"),
        ("mixed:salient=1,salient=2", "gives 'salient' twice"),
        ("bf16:rope=fp8", "rope_format = 'fp8': goes with cache_format"),
        ("fp8:rope=f16", "rope = 'f16': must be one of"),
    ],
)
def test_what_is_refused(spelled, sentence):
    with pytest.raises(ConfigError) as error:
        parse_variant(spelled, CONFIG)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_latents_that_do_not_fit():
    odd = dataclasses.replace(CONFIG, attention=dataclasses.replace(CONFIG.attention, kv_lora_rank=48))
    with pytest.raises(
        ConfigError, match=r"formats = 'fp4': attention\.kv_lora_rank = 48: must be a multiple"
    ):
        parse_variant("fp4", odd)


def test_the_far_scope_is_eight_windows_of_the_first_mixed_variant():
    variants = parse_variants(["fp8", "mixed", "mixed:window=256"], CONFIG)
    assert far_from(variants, 1152) == 1024
    with pytest.raises(ConfigError, match="context = 1151: must be at least 1152: 8 windows of 128"):
        far_from(variants, 1151)
    assert far_from(variants[:2], 64) is None


def test_bytes_are_those_of_the_arrays():
    layers, context = CONFIG.num_layers, 256
    assert (
        parse_variant("fp8", CONFIG).bytes_per_token(CONFIG, context)
        == layers * (32 + 4 + 16) + 2 * 4 / context
    )
    # Cold pages and their codebook, a ring of two pages and one of kept tokens; the salient ones' indices, and masses.
    cold, hot = 256 * (16 + 2 + 16) + 16 * 4, 3 * 128 * (32 + 2 + 16)
    tables = 2 * 4 + 4  # block table, slots
    per_layer = cold + hot + 4 * 28 + 4 * (256 + 28)
    mixed = parse_variant("mixed", CONFIG).bytes_per_token(CONFIG, context)
    assert mixed == (layers * per_layer + tables) / context
