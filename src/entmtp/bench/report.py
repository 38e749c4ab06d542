"""One HTML file that shows a run; it needs nothing beside itself."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from entmtp.bank import Bank
from entmtp.bench.figures import draw_costs, draw_headroom, draw_speeds, draw_strip, row_costs
from entmtp.bench.runs import Run
from entmtp.errors import InputError
from entmtp.files import write_text
from entmtp.plotting import figure_png

__all__ = ["REPORT_NAME", "write_report"]

REPORT_NAME = "bench.html"

_STRIP_OF = ("dynamic", "throughput", "hysteresis", "ladder", "auto", "hydra-best", "hydra")
"""Whose choices are shown on the sample: the first of these that ran."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; } .note { color: #555; } .bad { color: #b00; }
"""


def write_report(
    document: Mapping[str, Any],
    runs: Mapping[str, Sequence[Run]],
    banks: Mapping[str, Bank],
    folder: Path,
) -> Path:
    """Write the report; returns its file.

    Args:
        document: of the run.
        runs: by task.
        banks: by task, ``""`` for all.
        folder: that is there.

    Raises:
        InputError: it cannot be written.
    """
    parts = [
        "<h1>entmtp bench</h1>",
        _facts(document),
        _results(document),
        _plans(document),
        _strip(runs),
        _headroom(document),
        _costs(runs, banks),
        _ratios(document),
    ]
    body = "\n".join(part for part in parts if part)
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>entmtp bench</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>"
    )
    file = folder / REPORT_NAME
    try:
        write_text(file, text)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error})") from error
    return file


def _facts(document: Mapping[str, Any]) -> str:
    settings = document["settings"]
    rows = {
        "model": settings["source"]["model"],
        "heads": settings["source"]["drafter"],
        "backend": f"{document['backend']}, {document['precision']}",
        "processor": f"{document['cpu']}, {document['threads']} threads",
        "verification": settings["verification"],
        "temperature": settings["temperature"],
        "tokens a text, at most": settings["max_new_tokens"],
        "prompts": ", ".join(f"{task} {n}" for task, n in settings["num_prompts"].items()),
        "repeats": settings["repeats"],
        "versions": f"entmtp {document['entmtp']}, torch {document['torch']}",
        "command": " ".join(document["argv"]),
        "left out": "; ".join(f"{name}: {why}" for name, why in document["left_out"].items()),
    }
    return _table(None, [[name, str(value)] for name, value in rows.items() if value != ""])


def _results(document: Mapping[str, Any]) -> str:
    parts = ["<h2>Tokens a second</h2>", _image(draw_speeds(document["results"]), "tokens/s")]
    parts.append(
        '<p class="note">Decode only; bars are 95 % intervals over prompts. Grey: other programs, '
        "on fewer prompts: compare them by the ratios below.</p>"
    )
    header = [
        "method",
        "tokens/s",
        "95 %",
        "tokens/step",
        "identical",
        "perplexity",
        "gap, nats",
        "schedule / draft / forward / rest, ms",
        "switches",
        "ms a switch",
    ]
    for task, found in document["results"].items():
        parts.append(f"<h3>{escape(task)}</h3>")
        parts.append(_table(header, [_result_row(name, one) for name, one in found.items()]))
    return "\n".join(parts)


def _result_row(name: str, one: Mapping[str, Any]) -> list[str]:
    split = one["split_ms"]
    return [
        name,
        f"{one['tokens_per_s']:.1f}",
        _interval(one["ci95"], ".1f"),
        f"{one['mean_acceptance_length']:.2f}",
        f"{one['num_identical']}/{one['num_runs']}",
        f"{one['perplexity']:.3f}",
        f"{one['gap_nats']:+.4f}",
        " / ".join(f"{ms:.2f}" for ms in split.values()) if split else "-",
        "-" if one["num_switches"] is None else str(one["num_switches"]),
        "-" if one["switch_cost_ms"] is None else f"{one['switch_cost_ms']:+.3f}",
    ]


def _plans(document: Mapping[str, Any]) -> str:
    """What methods came down to, and the share of steps that each plan has."""
    parts = [
        "<h2>Plans</h2>",
        '<p class="note">Share of steps. Trees that are grown are told apart by their size.</p>',
    ]
    for task, found in document["results"].items():
        lines = [_plan_line(name, one) for name, one in found.items() if one["plan_shares"]]
        parts.append(f"<h3>{escape(task)}</h3>\n<ul>" + "\n".join(lines) + "</ul>")
    return "\n".join(parts)


def _plan_line(name: str, one: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{plan} {share:.1%}" for plan, share in one["plan_shares"].items())
    return f"<li><b>{escape(name)}</b> ({escape(one['policy'])}): {escape(shares)}</li>"


def _strip(runs: Mapping[str, Sequence[Run]]) -> str:
    """The first text of the first task under a policy that chooses."""
    task, found = next(iter(runs.items()))
    first = {run.method: run for run in reversed(found) if run.prompt == 0 and run.steps}
    name = next((name for name in _STRIP_OF if name in first), None)
    if name is None:
        return ""
    text = first[name].turns[0].text
    return (
        f"<h2>One text, step by step</h2>\n<p>Method <b>{escape(name)}</b> on the first prompt of "
        f"{escape(task)}.</p>\n{_image(draw_strip(first[name]), 'entropy, nodes, tokens kept')}\n"
        f"<blockquote>{escape(text)}</blockquote>"
    )


def _headroom(document: Mapping[str, Any]) -> str:
    shares = {
        task: found
        for task, found in document["headroom"].items()
        if any(share is not None for share in found.values())
    }
    if not shares:
        return ""
    rows = [
        [
            task,
            name,
            "-" if one["share"] is None else f"{one['share']:.1%}",
            f"{one['replayed_tokens_per_s']:.1f}",
            f"{one['best_static_tokens_per_s']:.1f} ({one['best_static']})",
            f"{one['bound_tokens_per_s']:.1f}",
        ]
        for task in shares
        for name, one in document["replay"][task].items()
    ]
    header = ["task", "method", "share", "tokens/s", "best single tree", "clairvoyant"]
    return "\n".join(
        (
            "<h2>Headroom</h2>",
            '<p class="note">By replay: 0 is the best single tree of the bank, 1 a clairvoyant '
            "choice among its trees. Grown trees and cut chains are not bound by it.</p>",
            _image(draw_headroom(shares), "headroom"),
            _table(header, rows),
        )
    )


def _costs(runs: Mapping[str, Sequence[Run]], banks: Mapping[str, Bank]) -> str:
    measured = {task: found for task, own in runs.items() if (found := row_costs(own))}
    tables = {name: bank.calibration.costs for name, bank in banks.items() if bank.calibration}
    if not measured and not tables:
        return ""
    return "<h2>Cost by rows</h2>\n" + _image(draw_costs(measured, tables), "milliseconds by rows")


def _ratios(document: Mapping[str, Any]) -> str:
    parts = [
        "<h2>Ratios</h2>",
        '<p class="note">Tokens/s of the row over that of the column on the prompts of both: '
        "median of the draws, 95 % interval below.</p>",
    ]
    for task, ratios in document["ratios"].items():
        names = list(document["results"][task])
        rows = [
            [escape(row), *(_ratio_cell(ratios.get(f"{row}/{column}")) for column in names)]
            for row in names
        ]
        parts.append(f"<h3>{escape(task)}</h3>")
        parts.append(_table(["", *names], rows, is_html=True))
    return "\n".join(parts)


def _ratio_cell(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    interval = _interval(ratio["ci95"], ".3f")
    return f"{ratio['median']:.3f}<br><small>{interval}</small>"


def _interval(ends: Sequence[float] | None, form: str) -> str:
    return "-" if ends is None else f"{ends[0]:{form}} to {ends[1]:{form}}"


def _table(
    header: Sequence[str] | None, rows: Sequence[Sequence[str]], *, is_html: bool = False
) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        shown = [cell if is_html and tag == "td" else escape(cell) for cell in cells]
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in shown) + "</tr>"

    head = "" if header is None else f"<thead>{line(header, 'th')}</thead>"
    return f"<table>{head}<tbody>" + "\n".join(line(row, "td") for row in rows) + "</tbody></table>"


def _image(figure: Any, title: str) -> str:
    data = base64.b64encode(figure_png(figure)).decode()
    return f'<p><img alt="{escape(title)}" src="data:image/png;base64,{data}"></p>'
