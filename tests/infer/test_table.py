import json

import pytest

from infer import table
from infer.__main__ import main
from infer.table import cache_table, gqa_groups
from mlaflax.config import AttentionConfig, ModelConfig

LAYERS = 3
CONFIG = ModelConfig(num_layers=LAYERS, max_length=1024, attention=AttentionConfig(num_heads=16))

# Bytes of one token in one layer at the DeepSeek shape, 512 + 64, by hand; 16 heads x 128, K and V.
PER_TOKEN = {
    "MHA 16 x 128 bf16": 2 * 16 * 128 * 2,
    "GQA 4 x 128 bf16": 2 * 4 * 128 * 2,
    "MLA f32": 576 * 4,
    "MLA bf16": 576 * 2,
    "MLA fp8": 656,
    "MLA int8": 512 + 16 * 2 + 128,
    "MLA fp4": 256 + 32 + 128,
    "MLA nuq4": 256 + 32 + 128,
    "MLA mixed": 256 + 32 + 128,
}


@pytest.mark.parametrize("allocate_up_to", [0, 1 << 30])
def test_bytes_are_those_of_the_arrays(monkeypatch, allocate_up_to):
    monkeypatch.setattr(table, "ALLOCATE_UP_TO", allocate_up_to)
    rows = {row.name: row for row in cache_table(CONFIG, context=1000, sequences=2)}
    assert list(rows) == list(PER_TOKEN)
    pages = 8  # of 128 tokens, for 1000
    for name, per_token in PER_TOKEN.items():
        row = rows[name]
        assert row.bytes_per_token == LAYERS * per_token
        beside = LAYERS * 16 * 4 if name in ("MLA nuq4", "MLA mixed") else 0
        if name == "MLA mixed":
            # Two pages of window and one of sinks in int8; slots.
            beside += 2 * (LAYERS * 3 * 128 * (512 + 16 * 2 + 128) + 4)
        assert row.bytes == 2 * pages * (LAYERS * 128 * per_token + 4) + beside
        assert row.allocated == (allocate_up_to > 0)


def test_grouped_heads_are_a_quarter_or_the_nearest_divisor():
    assert [gqa_groups(heads) for heads in (1, 2, 4, 6, 12, 16, 64, 128)] == [1, 1, 1, 1, 3, 4, 16, 32]


def test_command_line(checkpoint, capsys):
    assert main(["table", "--checkpoint", str(checkpoint), "--json", "--sequences", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["context"], report["sequences"]) == (4096, 4)
    fp8 = next(row for row in report["caches"] if row["name"] == "MLA fp8")
    assert fp8["bytes_per_token"] == 2 * (16 + 4 + 2 * 8)
    # 16 dims are not two halves of whole blocks: no 4-bit format holds them.
    assert [row["name"] for row in report["caches"][2:]] == ["MLA f32", "MLA bf16", "MLA fp8", "MLA int8"]
    assert main(["table", "--checkpoint", str(checkpoint), "--context", "131072"]) == 0
    assert "131,072" in capsys.readouterr().out
    assert main(["table", "--checkpoint", str(checkpoint), "--context", "0"]) == 2
    assert "context = 0: must be greater than 0" in capsys.readouterr().err
