import json
import pathlib

import nbclient
import nbformat
import pytest

from mlaflax.checkpoint import load_model
from mlaflax.decode import Engine, EngineConfig, SamplingParams
from tests.train.tiny import ROOT

NOTEBOOK = ROOT / "infer" / "notebooks" / "decode.ipynb"


@pytest.fixture(scope="module")
def executed(checkpoint, environment):
    """The notebook's cells after running it where it lies, on a small trained model."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLAFLAX_CHECKPOINT", str(checkpoint))
        for name, value in environment.items():
            patch.setenv(name, value)
        client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell) -> str:
    parts = []
    for output in cell.outputs:
        parts.append(output.text if output.output_type == "stream" else output.data.get("text/plain", ""))
    return "".join(parts)


def test_five_lines_give_the_library_s_text(executed, checkpoint: pathlib.Path):
    cell = executed[1]
    assert len([line for line in cell.source.splitlines() if line]) == 5
    model, tokenizer, *_ = load_model(checkpoint)
    engine = Engine(model, tokenizer, EngineConfig(cache_format="fp8", max_sequences=4))
    sampling = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95)
    assert shown(cell) == engine.generate(["And he said"], sampling)[0].text + "\n"


def test_streaming_and_the_table_show_what_they_promise(executed):
    streamed = next(cell for cell in executed if "engine.stream" in cell.source)
    assert "first token after" in shown(streamed)
    table = next(cell for cell in executed if "cache_table" in cell.source)
    assert all(name in shown(table) for name in ("MHA", "GQA", "MLA f32", "MLA bf16", "MLA fp8"))


def test_it_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
