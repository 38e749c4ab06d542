"""``entmtp heads``: what a file of heads is, conversion, and a check of its forward pass."""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import load_engine, model_options, read_records
from entmtp.commands.trace import prompt_options
from entmtp.errors import InputError
from entmtp.params import SamplingParams

if TYPE_CHECKING:
    from entmtp.checkpoints.verify import VerifyReport
    from entmtp.engine import Engine
    from entmtp.loading.heads_source import HeadsSource

__all__ = ["heads"]

_MODEL = click.option(
    "--model",
    default=None,
    help="The heads' model: a pulled name, a Hugging Face folder or id, or a .gguf file. "
    "If not given: the one that the heads name.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_NAMED = ("hydra++", "hydra", "medusa", "mtp")


@click.group()
def heads() -> None:
    """Inspect, convert and verify files of draft heads.

    PATH is a file, a folder or a Hugging Face id of heads; or hydra++, hydra, medusa (shipped) or
    mtp (in the model's own checkpoint), which need --model.
    """
    logging.basicConfig(level=logging.WARNING, format="Note: %(message)s")


@heads.command()
@click.argument("path")
@_MODEL
@_JSON
def inspect(path: str, model: str | None, as_json: bool) -> None:
    """Say what a file of heads is and what it needs.

    With --model, every tensor is also held against that model.
    """
    from entmtp.checkpoints.inspect import inspect_heads

    source = _source(path, model)
    facts = asdict(inspect_heads(source))
    if model is not None:
        from entmtp.loading.assets import resolve_model
        from entmtp.loading.drafters import heads_of_source
        from entmtp.loading.outline import ModelOutline

        heads_of_source(source, ModelOutline(resolve_model(model)), model)
        facts["fits"] = model
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        if value not in (None, (), []):
            text = ", ".join(value) if isinstance(value, list | tuple) else value
            click.echo(f"{key + ':':<16}{text}")


@heads.command()
@click.argument("path")
@click.argument("out", type=click.Path(path_type=Path))
@_MODEL
@click.option(
    "--dtype",
    default="keep",
    show_default=True,
    metavar="[keep|float32|float16|bfloat16|int8]",
    help="How matrices are stored; int8 has one scale a row and changes drafts a little.",
)
def convert(path: str, out: Path, model: str | None, dtype: str) -> None:
    """Write heads as one safetensors file that says what it holds."""
    from entmtp.checkpoints.convert import convert_heads
    from entmtp.loading.assets import resolve_model
    from entmtp.loading.outline import ModelOutline

    source = _source(path, model)
    model = model or _named_model(source)
    convert_heads(source, ModelOutline(resolve_model(model)), model, out, dtype=dtype)
    click.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB, for {model}")


@heads.command()
@click.argument("path")
@_MODEL
@click.option("--prompt", default="Explain how a tree grows.", show_default=True)
@click.option("--tokens", type=click.IntRange(8, 4096), default=48, show_default=True)
@click.option("--trees", type=click.IntRange(1, 1000), default=8, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--dtype", default="auto", metavar="[auto|float32|bfloat16|float16]")
@click.option("--device", default="auto", metavar="[auto|cpu|cuda]")
@_JSON
def verify(path: str, model: str | None, **options: Any) -> None:
    """Hold every node of random draft trees against the published formulas.

    Exit code 1 means that heads are drafted wrongly. The share of right first choices on the
    model's own text tells whether the heads belong to the model.
    """
    from entmtp.checkpoints.verify import verify_heads
    from entmtp.loading import load

    source = _source(path, model)
    model = model or _named_model(source)
    engine = load(model, "none", dtype=options["dtype"], device=options["device"])
    report = verify_heads(
        source,
        engine.target,
        model,
        _prompt(engine, options["prompt"]),
        num_tokens=options["tokens"],
        num_trees=options["trees"],
        seed=options["seed"],
        progress=_progress,
    )
    _print(report, options["as_json"])
    if report.wrong:
        raise SystemExit(1)


@heads.command()
@prompt_options
@click.option(
    "--trace",
    "file",
    type=click.Path(path_type=Path),
    default=None,
    help="Keep the trace here; else it is kept among the program's own files and found again.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--score",
    type=click.Choice(["joint", "own"]),
    default="joint",
    show_default=True,
    help="How trees are grown: one rollout for all candidates of a step, or one each.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder for plots (extra bench).",
)
@click.option("--threads", type=int, default=None, help="CPU threads.")
@model_options(trees=False)
@_JSON
def evaluate(
    workloads: tuple[str, ...],
    limit: int | None,
    max_new_tokens: int,
    file: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Measure what heads are worth: tokens a step of trees grown on half of the prompts.

    Each task of the prompts is scored on the half that its trees were not grown on.
    """
    from entmtp.commands.evaluation import evaluate_drafter

    records = read_records(workloads, limit)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=options.pop("temperature"),
        seed=options.pop("seed"),
    )
    as_json, score = options.pop("as_json"), options.pop("score")
    evaluate_drafter(
        load_engine(options), options["model"], records, sampling, file, score, report, as_json
    )


def _source(path: str, model: str | None) -> "HeadsSource":
    from entmtp.loading.drafters import source_of
    from entmtp.loading.heads_source import find_heads

    if path not in _NAMED:
        return find_heads(path)
    source = source_of(path, model or "smollm2-135m")
    assert source is not None  # noqa: S101 - only for auto
    return source


def _named_model(source: "HeadsSource") -> str:
    """The model that heads name as theirs."""
    from entmtp.checkpoints.inspect import inspect_heads

    base = inspect_heads(source).base_model
    if base is None:
        raise InputError(f"{source.path} does not name its model; give it with --model")
    return base


def _prompt(engine: "Engine", text: str) -> tuple[int, ...]:
    """A user's turn, or raw text where the model has no chat template."""
    try:
        return engine.chat_prompt(text)
    except InputError:
        return engine.encode(text)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done}/{total} trees", nl=done == total, err=True)


def _print(report: "VerifyReport", as_json: bool) -> None:
    facts = asdict(report)
    if as_json:
        click.echo(json.dumps(facts))
        return
    wrong = facts.pop("wrong")
    for key, value in facts.items():
        text = " ".join(f"{v:.2f}" for v in value) if isinstance(value, tuple) else value
        click.echo(f"{key + ':':<12}{text}")
    click.echo(f"{'wrong:':<12}{len(wrong)}")
    for node in wrong[:10]:
        click.echo(json.dumps(node))
