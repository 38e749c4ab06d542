"""``entmtp bench``: all ways to decode, side by side."""

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from entmtp.bench.methods import METHODS, default_methods, parse_methods
from entmtp.commands.bench_table import BenchProgress, print_spec_bench, print_task
from entmtp.commands.options import load_engine, model_options
from entmtp.commands.provenance import machine_facts
from entmtp.errors import InputError
from entmtp.params import SamplingParams, TypicalParams

if TYPE_CHECKING:
    from entmtp.bench.session import BenchResult, BenchSession
    from entmtp.workload import PromptRecord

__all__ = ["bench"]


@click.command(short_help="Compare all ways to decode, on the same prompts, in one run.")
@click.argument("workloads", nargs=-1, required=True, metavar="FILE|TASK...")
@click.option(
    "--methods",
    default=None,
    metavar="A,B,...",
    help=f"Of {', '.join(METHODS)}. All of this program that can run if not given.",
)
@click.option("--limit", type=int, default=None, help="Prompts taken from each task or file.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--repeats", type=int, default=1, show_default=True, help="Times that all is decoded."
)
@click.option(
    "--peer-limit",
    type=int,
    default=10,
    show_default=True,
    help="Prompts that other programs decode too.",
)
@click.option(
    "--verification",
    type=click.Choice(["exact", "typical"]),
    default="exact",
    show_default=True,
    help="typical is LOSSY: the text is no longer the model's own.",
)
@click.option(
    "--bank",
    "banks",
    multiple=True,
    metavar="[TASK=]NAME|FILE",
    help="A bank that ships or that 'entmtp calibrate' wrote, for one task or for all others; "
    "repeatable. Without: mixed, where it was made for this model and these heads.",
)
@click.option(
    "--medusa-heads", default="medusa", show_default=True, help="Heads of the method medusa."
)
@click.option(
    "--hydra-heads", default="hydra", show_default=True, help="Heads of the method hydra."
)
@click.option(
    "--headroom/--no-headroom",
    default=True,
    show_default=True,
    help="Trace the texts, and replay what a clairvoyant would gain.",
)
@click.option(
    "--spec-bench",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    metavar="DIR",
    help="The file is Spec-Bench's question.jsonl: ask all turns, report its six groups, write its "
    "answer files here.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    metavar="DIR",
    help="Write bench.html, one file with all pictures in it (extra bench).",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    metavar="DIR",
    help="Where finished prompts are kept until all is done; the program's own folder if not "
    "given.",
)
@click.option("--fresh", is_flag=True, help="Throw away what an earlier run finished.")
@click.option("--threads", type=int, default=None, help="CPU threads.")
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=None,
    metavar="FILE",
    help="Python of the environment in which vLLM is installed; this one if not given.",
)
@model_options(trees=False)
def bench(workloads: tuple[str, ...], **options: Any) -> None:
    """Decode the same prompts with every method, in turn, and compare.

    Each prompt is decoded by all methods before the next one comes. Tokens/s are those of
    decoding, the prompt apart; intervals (95 %) are of a bootstrap over prompts. A run that was
    stopped goes on where it was when it is given again. Exit code 1 means that a method which must
    write what plain decoding writes did not.
    """
    from entmtp.bench.document import find_differences
    from entmtp.bench.work import open_work
    from entmtp.loading.catalog import home

    json_file, report, answers = options["json_file"], options["report"], options["spec_bench"]
    _check_outputs(json_file, report, answers)
    with _cleaning_up(), _session(workloads, options) as session:
        folder = options["work"] or home() / "bench"
        with open_work(folder, session.digest, session.settings, is_fresh=options["fresh"]) as work:
            if work.num_done:
                _notice(f"{work.num_done} prompts were done before; --fresh starts over")
            try:
                result = session.run(work, machine_facts())
            except (KeyboardInterrupt, SystemExit):
                _notice("finished prompts are kept; the same command goes on")
                raise
            _print(result, session)
            _write(result, session, json_file, report, answers)
            work.remove()
    different = find_differences(result.outcome, is_exact=session.typical is None)
    if different:
        click.echo(
            "NOT IDENTICAL to plain decoding: " + "; ".join(different) + " ('entmtp check' tells "
            "rounding from bugs)",
            err=True,
        )
        raise SystemExit(1)


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """SIGTERM ends the run as ctrl-C does: files and processes of other programs go with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _session(workloads: tuple[str, ...], options: dict[str, Any]) -> "Iterator[BenchSession]":
    """Everything loaded, nothing decoded."""
    from entmtp.bench.banks import load_banks
    from entmtp.bench.contestants import Contestants, Heads
    from entmtp.bench.running import BenchParams
    from entmtp.bench.session import BenchSession, peer_setting
    from entmtp.bench.tasks import encode_tasks
    from entmtp.bench.vllm import find_vllm
    from entmtp.loading.catalog import home
    from entmtp.loading.loader import DEFAULT_BANK, default_bank

    if options["vllm_python"] is not None:
        find_vllm(options["vllm_python"])  # refused before anything is decoded
    given = options["methods"]
    named = None if given is None else parse_methods(given)
    params = BenchParams(
        SamplingParams(
            max_new_tokens=options["max_new_tokens"],
            temperature=options["temperature"],
            seed=options["seed"],
        ),
        options["repeats"],
        options["peer_limit"],
    )
    typical = TypicalParams() if options["verification"] == "typical" else None
    records = _read(workloads, options["limit"], is_spec_bench=options["spec_bench"] is not None)
    engine = load_engine(options)
    name, path = _model_of(options["model"])
    tasks = encode_tasks(engine, records, all_turns=options["spec_bench"] is not None)
    names = options["banks"] or ((DEFAULT_BANK,) if default_bank(engine) else ())
    banks = load_banks(names, engine, records, home() / "banks", options["temperature"])
    methods = named or default_methods(has_bank=bool(banks))
    heads = Heads(name, path, options["medusa_heads"], options["hydra_heads"], banks)
    traces = home() / "traces" if options["headroom"] else None
    with TemporaryDirectory(prefix="entmtp-bench-") as scratch:
        peers = peer_setting(engine, path, tasks, params, Path(scratch))
        peers = replace(peers, vllm_python=options["vllm_python"])
        yield BenchSession(
            Contestants(engine, heads, peers, typical, _notice),
            tasks,
            methods,
            params,
            typical,
            is_strict=given is not None,
            traces=traces,
            show=BenchProgress(is_terminal=sys.stderr.isatty()),
        )


def _read(
    workloads: tuple[str, ...], limit: int | None, *, is_spec_bench: bool
) -> "dict[str, list[PromptRecord]]":
    from entmtp.bench.specbench import read_questions
    from entmtp.bench.tasks import read_tasks

    if not is_spec_bench:
        return read_tasks(workloads, limit)
    if len(workloads) > 1:
        raise InputError(
            f"--spec-bench takes one file of questions, not {len(workloads)}; run it for each"
        )
    return read_questions(Path(workloads[0]), limit)


def _model_of(name: str) -> tuple[str, Path]:
    """Name and place of the target; of a folder of heads, those of its base."""
    from entmtp.loading.assets import resolve_model
    from entmtp.loading.heads_source import named_base_model

    path = resolve_model(name)
    base = named_base_model(path)
    return (name, path) if base is None else (base, resolve_model(base))


def _check_outputs(json_file: Path | None, report: Path | None, answers: Path | None) -> None:
    """Fail before anything is decoded where a result could not be written."""
    from entmtp.plotting import make_report_folder

    if report is not None:
        make_report_folder(report)
    if json_file is not None and json_file.is_dir():
        raise InputError(f"json {json_file}: a folder; name a file")
    folders = {"json": json_file and json_file.parent, "spec-bench": answers}
    for name, folder in folders.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{name} {folder}: cannot be written ({error})") from error


def _notice(line: str) -> None:
    click.echo(f"Note: {line}", err=True)


def _print(result: "BenchResult", session: "BenchSession") -> None:
    document = result.document
    click.echo(
        f"{document['settings']['source']['model']}, {document['backend']}, "
        f"{document['precision']}, {document['threads']} threads, {document['cpu']}"
    )
    if session.typical is not None:
        click.echo("typical acceptance is LOSSY: the texts are no longer those of the model alone")
    for task, found in result.outcome.results.items():
        click.echo()
        print_task(task, found, result.outcome.ratios[task], result.outcome.headroom[task])
    if result.outcome.spec_bench:
        click.echo()
        print_spec_bench(result.outcome.spec_bench)


def _write(
    result: "BenchResult",
    session: "BenchSession",
    json_file: Path | None,
    report: Path | None,
    answers: Path | None,
) -> None:
    from entmtp.bench.report import write_report
    from entmtp.bench.specbench import write_answers

    contestants = session.contestants
    files: list[Path] = []
    if json_file is not None:
        _write_json(result.document, json_file)
        files.append(json_file)
    if report is not None:
        banks = {name: found.bank for name, found in contestants.heads.banks.items()}
        files.append(write_report(result.document, result.runs, banks, report))
    if answers is not None:
        runs = list(result.runs.values())
        files += write_answers(answers, contestants.heads.model, session.tasks, runs)
    for file in files:
        click.echo(str(file), err=True)


def _write_json(document: Mapping[str, Any], file: Path) -> None:
    from entmtp.files import write_text

    try:
        write_text(file, json.dumps(document, allow_nan=False))
    except OSError as error:
        raise InputError(f"json {file}: cannot be written ({error})") from error
