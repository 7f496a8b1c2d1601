"""Results as tables for a person, and as files: report.md, report.json and plots."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from infer.evaluation import plots
from mlaflax.files import write_whole


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      title: one line.
      headings: of the columns; the first one is left-aligned.
      rows: cells.
      notes: sentences below it: what was measured on what.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def rendered(self) -> RichTable:
        table = RichTable(
            title=self.title,
            caption="\n".join(self.notes) or None,
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", "| " + " | ".join(self.headings) + " |"]
        lines.append("|" + "|".join([" --- ", *[" ---: "] * (len(self.headings) - 1)]) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *self.notes, ""])


def plain(value: Any) -> Any:
    """The same as strict JSON: what is no number is null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def tables(result: dict[str, Any]) -> list[Table]:
    """A table for each suite that was run."""
    return [t for suite, make in _TABLES.items() if suite in result for t in make(result)]


def write(directory: pathlib.Path, result: dict[str, Any]) -> list[pathlib.Path]:
    """Write report.md, report.json and the plots into `directory`; each is whole or not there.

    Returns:
      The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = plots.write(directory, result)
    pictures = "".join(f"![{f.stem}]({f.name})\n" for f in files)
    formats = ", ".join(result["variants"])
    head = (
        f"# What the cache's rounding costs: {result['checkpoint']}, step {result['step']}\n\n"
        f"Text: {result['text']}. Caches: {formats}. Status: {result['status']}.\n"
    )
    body = "\n".join(table.markdown() for table in tables(result))
    for name, content in (
        ("report.md", f"{head}\n{body}\n{pictures}"),
        ("report.json", json.dumps(plain(result), ensure_ascii=False, indent=1) + "\n"),
    ):
        write_whole(directory / name, content)
        files.append(directory / name)
    return files


def number(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """A number for a cell: - where there is none, a word where it is no number."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    return f"{value:{'+' if sign else ''}.{digits}f}"


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    return number(value, digits, sign=True) + ("" if error is None else f" ±{number(error, digits)}")


def _ppl_tables(result: dict[str, Any]) -> list[Table]:
    found = result["ppl"]
    made = []
    for scope, title in (
        ("all", "Perplexity, all tokens"),
        ("far", f"Perplexity, tokens after at least {found['far_from']} others"),
    ):
        rows = []
        for name, values in found["variants"].items():
            if scope not in values:
                continue
            here, real = values[scope], values[scope]["real_cache"]
            rows.append([
                name,
                number(result["variants"][name]["bytes_per_token"], 0),
                number(here["perplexity"], 3),
                with_error(here["perplexity_change_percent"], here["perplexity_change_error"]),
                "-" if real is None else with_error(real["perplexity_change_percent"], real["perplexity_change_error"]),
                f"{here['kl']:.2e}" if math.isfinite(here["kl"]) else "not finite",
                number(100 * here["top1_agreement"], 2),
                number(100 * here["cold_share"]["mean"], 1) if "cold_share" in here else "-",
            ])  # fmt: skip
        if not rows:
            continue
        sample = found["variants"][found["baseline"]][scope]
        notes = [
            f"{sample['tokens']:,} tokens of {sample['documents']} documents ({found['rows']} rows of "
            f"{found['context']:,} tokens); changes against {found['baseline']} of the same weights, in percent, "
            "± standard error clustered by document; simulated: training graph; real: appended to the cache.",
        ]
        if scope == "all":
            apart = {
                n: v["real_minus_simulated"]
                for n, v in found["variants"].items()
                if "real_minus_simulated" in v
            }
            if apart:
                worst = max(apart, key=lambda n: abs(apart[n]["mean_nll_difference"]))
                notes.append(
                    f"Real cache and simulation differ by at most {abs(apart[worst]['mean_nll_difference']):.1e} "
                    f"nats per token in the mean ({worst})."
                )
        headings = ["cache", "bytes", "ppl", "simulated %", "real %", "KL", "top-1 %", "cold %"]
        made.append(Table(title, headings, rows, notes))
    return made


def _needle_tables(result: dict[str, Any]) -> list[Table]:
    found = result["needle"]
    lengths = list(next(iter(found["variants"].values()))["lengths"])
    rows = []
    for name, values in found["variants"].items():
        cold, whole = values["cold"], values["all_cold"]
        rows.append([
            name,
            f"{values['hits']}/{values['trials']}",
            *(number(100 * values["lengths"][length]["hit_rate"], 0) for length in lengths),
            f"{values['lost']} of {values['baseline_found']}",
            *("-" if c is None else f"{c['hits']}/{c['needles']}" for c in (cold, whole)),
            "-" if cold is None else f"{cold['lost']} of {cold['baseline_found']}",
        ])  # fmt: skip
    measured = found["chance"]["measured"]
    notes = [
        f"{found['trials_per_depth']} texts of each length with {len(found['depths'])} needles each; columns of "
        f"lengths in percent. lost: found with {found['baseline']}, not with this cache. cold: needles whose "
        "answer is read in 4 bits in every layer, no token of it in the window, a sink or salient; all cold: the same "
        "of the whole statement. Asked for what "
        f"no text tells: {100 * sum(measured.values()) / len(measured):.1f} % (a guess: "
        f"{100 * found['chance']['computed']:.4f} %).",
    ]
    headings = [
        "cache",
        "hits",
        *(f"{length:,}" for length in lengths),
        "lost",
        "cold",
        "all cold",
        "lost cold",
    ]
    return [Table("Needles found", headings, rows, notes)]


def _fidelity_tables(result: dict[str, Any]) -> list[Table]:
    found = result["fidelity"]
    layers = found["layers"]
    note = f"{found['rows']} rows of {found['context']:,} tokens, exact activations"
    queries = f"queries from position {found['queries_from']:,} on"

    def by_layer(title: str, columns: Sequence[str], cell: Callable[[dict, str], str], said: str) -> Table:
        rows = [[str(i + 1), *(cell(layer, name) for name in columns)] for i, layer in enumerate(layers)]
        return Table(title, ["layer", *columns], rows, [said])

    def exponent(value: float) -> str:
        return f"{value:.1e}" if math.isfinite(value) else "not finite"

    made = [
        by_layer(
            "Relative squared error of the latents", list(layers[0]["latent"]),
            lambda layer, name: exponent(layer["latent"][name]["latent"]), f"{note}.",
        ),
        by_layer(
            "Relative squared error of attention's output", list(layers[0]["attention"]),
            lambda layer, name: exponent(layer["attention"][name]), f"{note}; {queries}.",
        ),
    ]  # fmt: skip
    for name, first in layers[0]["tiers"].items():
        rows = [
            [str(i + 1)]
            + [number(100 * share, 1) for share in layer["mass"][name].values()]
            + [exponent(error) for error in layer["tiers"][name].values()]
            for i, layer in enumerate(layers)
        ]
        headings = ["layer", *(f"{s} %" for s in layers[0]["mass"][name]), *(f"{t} only" for t in first)]
        said = f"{note}; {queries}. Attention that each tier gets; error with that tier alone rounded."
        made.append(Table(f"Tiers of {name}", headings, rows, [said]))
    return made


def _speed_tables(result: dict[str, Any]) -> list[Table]:
    found = result["speed"]
    rows = [
        [name, *(number(values.get(key), 2) for key in ("tokens_per_second", "of_f32", "of_bf16"))]
        for name, values in found["variants"].items()
    ]
    said = (
        f"One sequence of {found['context']:,} tokens; medians of {found['rounds']} rounds of "
        f"{found['tokens_per_round']} tokens, the caches taking turns; ratios within a round."
    )
    return [Table("Decoding", ["cache", "tokens/s", "of f32", "of bf16"], rows, [said])]


_TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "ppl": _ppl_tables,
    "needle": _needle_tables,
    "fidelity": _fidelity_tables,
    "speed": _speed_tables,
}
