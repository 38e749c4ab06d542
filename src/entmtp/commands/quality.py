"""``entmtp quality``: what quantisation costs, in perplexity, KL divergence and agreement."""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.provenance import machine_facts
from entmtp.errors import InputError

if TYPE_CHECKING:
    from entmtp.quality import BackendQuality, Estimate, Text

__all__ = ["quality"]

_FEW_TEXTS = 20


@click.command()
@click.option(
    "--text",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="Plain text, or a set of prompts with references (.jsonl, .json).",
)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option(
    "--backends",
    default="float32,bfloat16,int8,llamacpp:Q8_0,llamacpp:Q4_0",
    show_default=True,
    help="Also float16 and llamacpp:BF16; those that cannot run here are left out.",
)
@click.option("--window", type=int, default=512, show_default=True, help="Tokens read together.")
@click.option("--limit", type=int, default=None, help="Most positions counted.")
@click.option("--threads", type=int, default=None, help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def quality(
    file: Path, model: str, backends: str, window: int, limit: int | None, **options: Any
) -> None:
    """Compare backends with float32 on a text, position by position.

    Intervals (95 %) are percentiles of a bootstrap over texts: windows of plain text, or answers.
    """
    import torch

    from entmtp.loading.assets import resolve_model, tokenizer_folder
    from entmtp.loading.loader import set_threads
    from entmtp.loading.tokenizers import load_tokenizer
    from entmtp.quality import (
        estimate,
        limit_texts,
        measure,
        open_scorers,
        parse_backends,
        read_texts,
    )
    from entmtp.target.weights import read_config

    logging.basicConfig(level=logging.WARNING, format="Note: %(message)s")
    names = parse_backends(backends)
    if options["threads"] is not None:
        set_threads(options["threads"])
    path = resolve_model(model)
    longest = read_config(path).context_window
    if window > longest:
        raise InputError(f"window is {window}; the model's context window is {longest}")
    tokenizer = load_tokenizer(tokenizer_folder(path))
    texts = limit_texts(read_texts(file, tokenizer, window), limit)
    with open_scorers(
        path, names, threads=torch.get_num_threads(), window=window, notice=_notice
    ) as scorers:
        found = dict(zip(scorers, estimate(measure(scorers, texts, _progress)), strict=True))
    if options["as_json"]:
        facts = _facts(file, model, texts, window)
        found_facts = {name: one.as_dict() for name, one in found.items()}
        click.echo(json.dumps({**facts, "backends": found_facts}))
    else:
        _print(found, texts)


def _notice(line: str) -> None:
    click.echo(f"Note: {line}", err=True)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done}/{total} texts", nl=done == total, err=True)


def _facts(file: Path, model: str, texts: "list[Text]", window: int) -> dict[str, Any]:
    """Where the numbers come from."""
    from entmtp.quality import CONFIDENCE, RESAMPLES, SEED, text_digest

    return {
        **machine_facts(),
        "model": model,
        "text": file.name,
        "text_digest": text_digest(texts),
        "window": window,
        "num_texts": len(texts),
        "num_positions": sum(text.num_counted for text in texts),
        "interval": f"bootstrap over texts, {RESAMPLES} draws, seed {SEED}, percentiles",
        "confidence": CONFIDENCE,
    }


def _print(found: "dict[str, BackendQuality]", texts: "list[Text]") -> None:
    positions = sum(text.num_counted for text in texts)
    click.echo(f"{positions} positions of {len(texts)} texts; intervals of 95 % over texts")
    if len(texts) < _FEW_TEXTS:
        click.echo(f"fewer than {_FEW_TEXTS} texts: the intervals are too narrow")
    titles = ("perplexity", "against float32, %", "KL, nats", "top-1 agreement, %")
    click.echo(f"{'backend':<16}" + "".join(f"{title:>30}" for title in titles))
    for name, one in found.items():
        cells = (
            _cell(one.perplexity, 1, ".4f"),
            _cell(one.difference, 100, "+.3f"),
            _cell(one.kl, 1, ".5f"),
            _cell(one.agreement, 100, ".2f"),
        )
        click.echo(f"{name:<16}" + "".join(f"{cell:>30}" for cell in cells))


def _cell(one: "Estimate", scale: float, form: str) -> str:
    text = format(one.value * scale, form)
    if one.low is None or one.high is None:
        return text
    return f"{text} [{one.low * scale:{form}}, {one.high * scale:{form}}]"
