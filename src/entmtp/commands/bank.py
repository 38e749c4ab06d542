"""``entmtp bank``: look at banks, compare them, and say whether one can be used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import load_engine, model_options
from entmtp.errors import InputError

if TYPE_CHECKING:
    from entmtp.bank import Bank

__all__ = ["bank", "print_bank"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_FILE = click.argument("bank", metavar="NAME|FILE")


@click.group()
def bank() -> None:
    """Show, compare and validate banks of trees.

    A bank is one of those that ship (code, math, chat, creative, mixed) or a file that 'entmtp
    calibrate' wrote.
    """


@bank.command()
@_FILE
@_JSON
def show(bank: str, as_json: bool) -> None:
    """List the entries of a bank and what is known of them."""
    found = _read(bank)
    if as_json:
        click.echo(json.dumps(_facts(found), allow_nan=False))
    else:
        print_bank(found)


@bank.command()
@click.argument("banks", metavar="NAME|FILE...", nargs=-1, required=True)
@_JSON
def compare(banks: tuple[str, ...], as_json: bool) -> None:
    """The best tree of each bank on the texts and costs of each other, by replay.

    One line a bank whose tree it is, one column a bank whose texts and costs are used: predicted
    tokens/s on the texts that no tree was fitted to, and the share of the column's own best.
    """
    if len(banks) < 2:
        raise InputError("name at least two banks to compare")
    from entmtp.calibrate.compare import compare_banks

    found = {name: _read(name) for name in banks}
    table = compare_banks(found)
    if as_json:
        click.echo(json.dumps(table, allow_nan=False))
        return
    names = [Path(name).stem for name in banks]
    width = max(12, *(len(name) + 2 for name in names))
    click.echo(f"{'tree of':<{width}}" + "".join(f"{name:>22}" for name in names))
    for name, label in zip(banks, names, strict=True):
        cells = [
            f"{table[name][other]['tokens_per_s']:.1f} ({table[name][other]['share']:.3f})"
            for other in banks
        ]
        click.echo(f"{label:<{width}}" + "".join(f"{cell:>22}" for cell in cells))
    alike = _alike(found)
    if alike:
        click.echo("one tree: " + "; ".join(alike))


def _alike(banks: "Mapping[str, Bank]") -> list[str]:
    """Banks whose best trees are the same, so that their rows are."""
    by_tree: dict[Any, list[str]] = {}
    for name, found in banks.items():
        by_tree.setdefault(found.entries[found.best].paths, []).append(Path(name).stem)
    return [", ".join(names) for names in by_tree.values() if len(names) > 1]


@bank.command()
@_FILE
@click.option("--threads", type=int, default=None, help="CPU threads.")
@model_options(trees=False)
def validate(bank: str, **options: Any) -> None:
    """Say whether a bank can be used with a model and heads, and whether steps were timed here."""
    found = _read(bank)
    engine = load_engine(options)
    from entmtp.calibrate.adapt import check_bank
    from entmtp.loading.catalog import home

    click.echo(check_bank(found, engine, home() / "banks"))


def _read(name: str) -> "Bank":
    from entmtp.bank import load_bank

    return load_bank(name)


def _facts(found: "Bank") -> dict[str, Any]:
    """The JSON form: entries with all numbers, and where they come from; without the texts."""
    from dataclasses import asdict

    from entmtp.bank import SCHEMA_VERSION

    facts: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "entries": [
            {
                "name": name,
                "paths": tree.to_list(),
                "num_nodes": tree.num_nodes,
                **_score(found, name),
            }
            for name, tree in found.entries.items()
        ],
    }
    if found.calibration is not None:
        about = found.calibration.as_dict()
        del about["trace"]
        facts |= about
        facts["source"] = asdict(found.calibration.source)
    return facts


def _score(found: "Bank", name: str) -> dict[str, Any]:
    from dataclasses import asdict

    from entmtp.bank import EntryScore

    return asdict(found.scores.get(name, EntryScore()))


def print_bank(found: "Bank") -> None:
    """A table of entries, and where they come from."""
    calibration = found.calibration
    if calibration is not None:
        source, costs = calibration.source, calibration.costs
        click.echo(
            f"{source.model}, {source.drafter}, {source.backend} {source.precision}, "
            f"{source.threads} threads of {source.device}"
        )
        click.echo(
            f"context {calibration.context:.0f}; costs from {costs.num_rounds} rounds, certain to "
            f"{100 * costs.spread:.1f} %"
        )
    click.echo(
        f"\n{'entry':<14}{'nodes':>6}{'depth':>6}{'joint':>8}{'own':>8}{'step ms':>9}"
        f"{'tokens/s':>10}{'checked':>9}{'time ratio':>12}  source"
    )
    for name, tree in found.entries.items():
        score = _score(found, name)
        click.echo(
            f"{name:<14}{tree.num_nodes:>6}{tree.max_depth:>6}"
            f"{_number(score['accept_joint'], 3):>8}{_number(score['accept_own'], 3):>8}"
            f"{_number(score['step_ms'], 2):>9}{_number(score['tokens_per_s'], 1):>10}"
            f"{_number(score['measured_tokens_per_s'], 1):>9}{_number(score['time_ratio'], 3):>12}"
            f"  {' '.join(score['source'])}"
        )
    if calibration is not None and calibration.policies:
        _print_policies(calibration.policies)


def _print_policies(policies: Mapping[str, Any]) -> None:
    """Predicted tokens/s, fastest first; the bound is no policy that can be used."""
    click.echo(f"\n{'policy':<17}{'fitted':>9}{'checked':>9}{'headroom':>10}")
    rates = {name: found["check_tokens_per_s"] for name, found in policies.items()}
    for name in sorted(rates, key=lambda name: -rates[name]):
        found = policies[name]
        mark = "  (a bound, for policies over whole trees)" if name == "clairvoyant" else ""
        click.echo(
            f"{name:<17}{found['fit_tokens_per_s']:>9.1f}{rates[name]:>9.1f}"
            f"{_number(found['headroom_share'], 3):>10}{mark}"
        )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
