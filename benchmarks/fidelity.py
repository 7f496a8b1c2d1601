"""Whether the mixed cache costs nothing: perplexity and needles beside bf16, and what its parts are worth.

    python -m benchmarks.fidelity --checkpoint runs/latent_qat --control runs/latent_control --corpus stdlib [--check]

On rows of text that the run held out, or of a corpus that it never read, all of them through the same weights:

    perplexity   through the real mixed cache less than 0.05 % above bf16, known to 0.02 % (standard error clustered
                 by document); with --control also above the bf16 perplexity of that run's weights
    cold share   at least 80 % of the tokens that a judged token's query reads, on average, are in 4 bits
    deleting     these tokens raises perplexity by 1 % or more: they are needed
    needles      bf16 finds at least 95 % of the facts that long text tells and at most 1 % of those that it does not,
                 and the mixed cache loses none; --needles names a model that has learned this

Salient tokens are compared with none, with as many random ones, and with a longer window of the same bytes: whether
they differ by more than two standard errors is told, and decides nothing.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

COST, ERROR, COLD, DELETED = 0.05, 0.02, 0.8, 1.0  # percent, percent, share, percent
FOUND, GUESSED = 0.95, 0.01  # shares


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="directory of a training run")
    parser.add_argument("--control", help="run whose bf16 perplexity on the same rows is a second baseline")
    parser.add_argument("--needles", help="run to ask for needles, in place of the checkpoint")
    parser.add_argument(
        "--mixed", default="mixed", help="the mixed cache, as `python -m infer evaluate` spells it"
    )
    parser.add_argument("--text", action="append", default=[], help="text in place of what the run held out")
    parser.add_argument(
        "--corpus", help="named text that the run did not train on, as `python -m train` names it"
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--rows", type=int, default=64, help="rows of text; 0 for all there are")
    parser.add_argument(
        "--scope", choices=["all", "far"], default="far",
        help="tokens that are judged: all, or those with eight windows before them",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="of texts with needles"
    )
    parser.add_argument("--depths", type=int, default=10, help="needles in a text")
    parser.add_argument("--trials", type=int, default=4, help="texts of each length")
    parser.add_argument("--seed", type=int, default=0, help="of rows and needles")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    args = parser.parse_args(arguments)

    from mlaflax.checkpoint import CheckpointError
    from mlaflax.config import ConfigError

    try:
        figures = measure(args)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        from infer.evaluation.report import plain

        args.json.write_text(json.dumps(plain(figures), indent=1))
    for line in lines(figures):
        print(line)
    missed = judge(figures)
    if missed:
        print(f"Missed: {'; '.join(missed)}.")
    print(sentence(figures))
    return 1 if args.check and missed else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from infer.evaluation import ppl
    from infer.evaluation.text import held_out_text, rows_of
    from infer.evaluation.variants import far_from, parse_variant
    from mlaflax.checkpoint import load_model
    from mlaflax.cli import Terminal
    from mlaflax.config import require

    terminal = Terminal()
    model, tokenizer, config, step = load_model(args.checkpoint)
    require(tokenizer is not None, "checkpoint", args.checkpoint, "must hold a tokenizer")
    assert tokenizer is not None
    mixed = parse_variant(args.mixed, config)
    require(mixed.tiered, "mixed", args.mixed, "must be a mixed cache")
    sizes = mixed.mixed

    def variant(name: str, **changes: Any) -> Any:
        return dataclasses.replace(mixed, name=name, mixed=dataclasses.replace(sizes, **changes))

    bf16 = parse_variant("bf16", config)
    # Where the cache keeps no salient tokens, those that would fill the page of its sinks.
    salient = dataclasses.replace(sizes, salient=sizes.salient or -sizes.sinks % sizes.page or sizes.page)
    wanted = {
        "mixed": variant("mixed"),
        "deleted": variant("deleted", cold="none"),
        "salient": variant("salient", salient=salient.salient, choose="attention"),
        "none": variant("none", salient=0),
        "random": variant("random", salient=salient.salient, choose="random"),
        # As many pages: the kept ones become part of the window.
        "window": variant(
            "window", window=sizes.window + salient.kept_pages * sizes.page, sinks=0, salient=0
        ),
    }
    # What is the mixed cache itself under another name is measured once.
    alias = {name: next(n for n, w in wanted.items() if w.mixed == v.mixed) for name, v in wanted.items()}
    variants = [bf16, *(wanted[name] for name in dict.fromkeys(alias.values()))]
    text = held_out_text(args.checkpoint, tokenizer, args.text, args.corpus)
    rows = rows_of(text, args.context, max_rows=args.rows, seed=args.seed)
    far = far_from(variants, args.context)
    assert far is not None
    with terminal.progress("perplexity", ppl.steps(rows, variants)) as advance:
        found = ppl.collect(model, variants, rows, advance=advance)

    where = slice(far, None) if args.scope == "far" else slice(0, None)

    def against(scores: Any, base: Any) -> dict[str, Any]:
        return compare(scores.nll[:, where], base.nll[:, where], rows.documents)

    simulated = found.simulated
    real = {"bf16": found.cached["bf16"]}
    real |= {name: found.cached[alias[name]] for name, v in wanted.items() if v.served}
    figures = {
        "checkpoint": args.checkpoint,
        "step": step,
        "mixed": dataclasses.asdict(sizes),
        "text": text.source,
        "context": args.context,
        "rows": len(rows.tokens),
        "scope": args.scope,
        "far_from": far,
        "perplexity": against(real["mixed"], real["bf16"]),
        "cold_share": ppl.cold_share(sizes, args.context, where.start),
        "deleted": against(simulated["deleted"], simulated["bf16"]),
        "salient": salient.salient,
        **{name: against(real[name], real["salient"]) for name in ("none", "random", "window")},
        "bytes_per_token": {
            v.name: v.bytes_per_token(config, args.context) for v in variants if v.name != "deleted"
        },
        "summary": ppl.summary(variants, rows, found),
        "control": None,
    }
    if args.control:
        other = load_model(args.control)
        same = other.tokenizer is not None and other.tokenizer.fingerprint == tokenizer.fingerprint
        require(same, "control", args.control, "must have the checkpoint's tokenizer")
        base = parse_variant("bf16", other.config)
        with terminal.progress("perplexity of the control", ppl.steps(rows, [base])) as advance:
            control = ppl.collect(other.model, [base], rows, advance=advance)
        figures["control"] = against(real["mixed"], control.cached["bf16"])

    figures["needle"] = measure_needles(args, terminal)
    return figures


def measure_needles(args: argparse.Namespace, terminal: Any) -> dict[str, Any]:
    """What `--needles`, or the checkpoint, finds with bf16 and with the mixed cache, in text that it held out."""
    from infer.evaluation import needle
    from infer.evaluation.text import held_out_text
    from infer.evaluation.variants import parse_variant
    from mlaflax.checkpoint import load_model
    from mlaflax.config import require
    from train.data.needle import NeedleTask

    directory = args.needles or args.checkpoint
    model, tokenizer, config, _ = load_model(directory)
    require(tokenizer is not None, "needles", directory, "must hold a tokenizer")
    assert tokenizer is not None
    task = NeedleTask(tokenizer)
    lengths = [n for n in args.lengths if n <= config.max_length]
    require(
        bool(lengths), "lengths", args.lengths, f"must not all exceed model.max_length ({config.max_length})"
    )
    text = held_out_text(directory, tokenizer, args.text)
    stacks = needle.haystacks(task, text, lengths, args.depths, args.trials, args.seed)
    variants = (
        parse_variant("bf16", config),
        dataclasses.replace(parse_variant(args.mixed, config), name="mixed"),
    )
    readers = {v.name: needle.CacheReader(model, v, max(lengths)) for v in variants}
    with terminal.progress("needles", needle.steps(stacks, len(readers))) as advance:
        return needle.measure(readers, task, stacks, advance)


def compare(nll: Any, base: Any, documents: Any) -> dict[str, Any]:
    """Change of perplexity in percent with its clustered standard error, and whether it is over two of them."""
    from infer.evaluation.statistics import clustered_mean, perplexity_change

    difference = clustered_mean(nll - base, documents)
    change = perplexity_change(difference)
    return {
        "percent": change.percent,
        "error": change.error,
        "differs": change.error is not None and abs(change.percent) > 2 * change.error,
        "tokens": difference.tokens,
        "documents": difference.documents,
    }


def judge(figures: dict[str, Any]) -> list[str]:
    """What is missed, in words."""
    missed = []
    for name in ("perplexity", "control"):
        cost = figures[name]
        if cost is None:
            continue
        beside = "bf16" if name == "perplexity" else "the control"
        # Not "above": what is no number misses, too.
        if not cost["percent"] < COST:
            missed.append(f"perplexity beside {beside} {percent(cost)}, target below {COST} %")
        if cost["error"] is None or not cost["error"] <= ERROR:
            missed.append(f"standard error beside {beside} of {percent(cost)}, target at most {ERROR} %")
    if not figures["cold_share"]["mean"] >= COLD:
        missed.append(f"{figures['cold_share']['mean']:.1%} of the tokens cold, target at least {COLD:.0%}")
    if not figures["deleted"]["percent"] >= DELETED:
        missed.append(f"without cold tokens {percent(figures['deleted'])}, target at least +{DELETED} %")
    needles = figures["needle"]["variants"]["mixed"]
    found = needles["baseline_found"] / needles["trials"]
    if not found >= FOUND:
        missed.append(f"bf16 finds {found:.1%} of the needles, target at least {FOUND:.0%}")
    guessed = max(figures["needle"]["chance"]["measured"].values())
    if not guessed <= GUESSED:
        missed.append(f"bf16 guesses {guessed:.1%} of what no text tells, target at most {GUESSED:.0%}")
    if needles["lost"]:
        missed.append(f"{needles['lost']} needles lost of {needles['baseline_found']}, target 0")
    return missed


def lines(figures: dict[str, Any]) -> list[str]:
    needles = figures["needle"]["variants"]["mixed"]
    cost = figures["perplexity"]
    told = "all tokens" if figures["scope"] == "all" else f"tokens after {figures['far_from']:,} others"
    found = [
        f"{'on':12} {cost['tokens']:,} {told} of {cost['documents']} documents, rows of {figures['context']:,}",
        f"{'mixed':12} {percent(cost)} perplexity beside bf16",
    ]
    if figures["control"]:
        found.append(f"{'control':12} {percent(figures['control'])} perplexity beside the control's bf16")
    cold = figures["cold_share"]
    found += [
        f"{'cold':12} {cold['mean']:.1%} of the tokens that these read, {cold['last']:.1%} at the end of a row",
        f"{'deleted':12} {percent(figures['deleted'])} perplexity without cold tokens, beside bf16",
        f"{'needles':12} {needles['lost']} lost of {needles['baseline_found']} that bf16 finds, "
        f"of {needles['trials']} asked for; {needles['cold']['needles']} of these are cold, "
        f"{needles['cold']['lost']} of them lost",
    ]
    for name, what in (
        ("none", "nothing"),
        ("random", "random tokens"),
        ("window", "a longer window of the same bytes"),
    ):
        verdict = "more" if figures[name]["differs"] else "not more"
        found.append(
            f"{name:12} {percent(figures[name])} perplexity with {what} in place of {figures['salient']} salient "
            f"tokens: {verdict} than two errors"
        )
    return found


def percent(change: dict[str, Any]) -> str:
    error = "" if change["error"] is None else f" ± {change['error']:.3f}"
    return f"{change['percent']:+.3f}{error} %"


def sentence(figures: dict[str, Any]) -> str:
    needles = figures["needle"]["variants"]["mixed"]
    return (
        f"The mixed cache changes perplexity by {percent(figures['perplexity'])} (target: below {COST} ± {ERROR} %) "
        f"with {figures['cold_share']['mean']:.0%} of the tokens cold (target: at least {COLD:.0%}) and loses "
        f"{needles['lost']} of {needles['baseline_found']} needles (target: 0)."
    )


if __name__ == "__main__":
    sys.exit(main())
