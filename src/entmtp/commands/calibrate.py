"""``entmtp calibrate``: from a workload to a bank of trees."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.distributed import Distribution, cluster_options, take_distribution
from entmtp.commands.options import load_engine, model_options, read_records
from entmtp.commands.provenance import machine_facts
from entmtp.commands.trace import prompt_options, show_progress
from entmtp.errors import BankError, InputError
from entmtp.params import SamplingParams, TypicalParams

if TYPE_CHECKING:
    from entmtp.calibrate.build import CalibrateParams, CalibrationRun
    from entmtp.workload import PromptRecord

__all__ = ["calibrate"]

_QUICK_TOKENS, _QUICK_LIMIT = 128, 16
_FEW_PROMPTS = 16  # below which a bank hangs on single texts


@click.command()
@prompt_options
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Bank file that is written, in a folder that is made if it is missing; only a bank is "
    "overwritten.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--max-nodes", type=int, default=64, show_default=True, help="Of the trees that are grown."
)
@click.option(
    "--measure",
    type=click.Choice(["best", "all", "none"]),
    default="best",
    show_default=True,
    help="Entries that are decoded end to end; all: the whole acceptance frontier.",
)
@click.option(
    "--costs",
    "costs_file",
    type=click.Path(path_type=Path),
    default=None,
    help="Take the costs of steps from this bank instead of timing them; the new bank is then for "
    "the machine of that one.",
)
@click.option(
    "--verification",
    type=click.Choice(["exact", "typical"]),
    default="exact",
    show_default=True,
    help="typical: score trees by decoding under typical acceptance, which is LOSSY.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="A rough bank in about a minute: 16 prompts of 128 tokens where "
    "no others are asked for, short timing, nothing measured.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder for plots (extra bench).",
)
@cluster_options
@click.option("--threads", type=int, default=None, help="CPU threads.")
@model_options(trees=False)
def calibrate(
    workloads: tuple[str, ...],
    limit: int | None,
    max_new_tokens: int,
    output: Path,
    **options: Any,
) -> None:
    """Find the trees that pay for a workload on this machine; write them as a bank.

    The texts are decoded once and the drafter's guesses about them are traced; trees are grown on
    every second prompt, steps are timed, and the best entries are decoded to check the predictions.
    A run that was stopped goes on where it was when it is given again.
    """
    is_quick, report = options.pop("quick"), options.pop("report")
    if is_quick:
        limit = _QUICK_LIMIT if limit is None else limit
        source = click.get_current_context().get_parameter_source("max_new_tokens")
        if source is click.core.ParameterSource.DEFAULT:
            max_new_tokens = _QUICK_TOKENS
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=options.pop("temperature"),
        seed=options.pop("seed"),
    )
    if report is not None:
        from entmtp.plotting import make_report_folder

        make_report_folder(report)
    _check_output(output, workloads)
    params = _params(options, is_quick)
    distribution = take_distribution(options)
    records = read_records(workloads, limit)
    _check_records(records, max_new_tokens)
    work = output.with_name(f"{output.name}.work")
    with _held(work):
        _tell_few(len(records))
        run = _calibrated(records, sampling, params, (output, work), distribution, options)
        _print(run, output)
        if report is not None:
            from entmtp.calibrate.report import write_report

            for file in write_report(run, report):
                click.echo(str(file))
        _remove(work)


def _calibrated(
    records: "list[PromptRecord]",
    sampling: SamplingParams,
    params: "CalibrateParams",
    files: tuple[Path, Path],
    distribution: "Distribution | None",
    options: dict[str, Any],
) -> "CalibrationRun":
    """Load the model, make the bank, write it; the files are the bank's and the folder of work."""
    engine = load_engine(options)

    from entmtp.calibrate.build import Calibrator
    from entmtp.calibrate.collect import TraceSettings
    from entmtp.calibrate.session import usual_envelope
    from entmtp.loading.catalog import home

    output, work = files
    with ExitStack() as stack:
        cluster = None
        if distribution is not None:
            is_timed = params.costs is None
            cluster = stack.enter_context(distribution.open(engine, options, is_timed=is_timed))
        calibrator = Calibrator(
            engine,
            options["model"],
            TraceSettings(sampling, envelope=usual_envelope(engine.drafter)),
            params,
            (home() / "traces", work),
            _show,
            cluster=cluster,
        )
        run = calibrator.run(records, machine_facts())
        run.bank.write(output)
    return run


def _remove(work: Path) -> None:
    """At once, so that a run which is killed here leaves all of it or nothing to go on with."""
    done = work.with_name(f"{work.name}.done")
    shutil.rmtree(done, ignore_errors=True)
    with suppress(OSError):
        work.rename(done)
    shutil.rmtree(done, ignore_errors=True)


@contextmanager
def _held(work: Path) -> Iterator[None]:
    """Keep other runs out of the folder of work, which goes where nothing was begun."""
    from entmtp.files import BusyFolderError, holding

    with ExitStack() as stack:
        try:
            stack.enter_context(holding(work))
        except BusyFolderError as error:
            raise BankError(str(error)) from error
        except OSError as error:
            raise BankError(f"{work}: cannot be written ({error}); name another output") from error
        try:
            yield
        finally:
            with suppress(OSError):
                if {file.name for file in work.iterdir()} <= {"run.lock"}:
                    _remove(work)


def _params(options: dict[str, Any], is_quick: bool) -> "CalibrateParams":
    from entmtp.bank import load_bank
    from entmtp.calibrate.build import CalibrateParams
    from entmtp.calibrate.timing import TimingParams

    costs_file, measure = options.pop("costs_file"), options.pop("measure")
    costs = None if costs_file is None else load_bank(costs_file)
    if costs is not None and costs.calibration is None:
        raise InputError(f"{costs_file}: not a calibrated bank, so it has no costs")
    timing = TimingParams()
    if is_quick:
        timing = TimingParams(contexts=(256,), batches=(1, 4), min_rounds=5, seconds=15.0)
    is_typical = options.pop("verification") == "typical"
    return CalibrateParams(
        max_nodes=options.pop("max_nodes"),
        timing=timing,
        costs=costs,
        measure="none" if is_quick and measure == "best" else measure,
        typical=TypicalParams() if is_typical else None,
    )


def _check_output(output: Path, workloads: tuple[str, ...]) -> None:
    """Fail before anything is decoded where the bank could not be written, or in place of what."""
    if output.is_dir():
        raise InputError(f"output {output}: a folder; name a file for the bank")
    if any(output.resolve() == Path(name).resolve() for name in workloads):
        raise InputError(f"output {output}: the file of the prompts; name another one")
    if output.exists():
        from entmtp.bank import Bank

        try:
            Bank.read(output)
        except BankError as error:
            raise InputError(
                f"output {output}: exists and is no bank, so it is not overwritten; name another "
                f"file, or delete it ({error})"
            ) from error
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {output}: cannot be written ({error})") from error


def _check_records(records: "list[PromptRecord]", max_new_tokens: int) -> None:
    """Fail before anything is loaded where no bank could come of it."""
    from entmtp.calibrate.build import check_tasks

    check_tasks(records)
    if max_new_tokens < 2:
        raise InputError(f"max_new_tokens is {max_new_tokens}; a step takes texts of at least 2")


def _tell_few(num_prompts: int) -> None:
    """Say so where a bank would hang on single texts."""
    if num_prompts < _FEW_PROMPTS:
        click.echo(
            f"Note: of {num_prompts} prompts one half chooses the trees and the policies and the "
            f"other checks them; with fewer than {_FEW_PROMPTS} much of that is chance",
            err=True,
        )


def _show(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        show_progress(stage, done, total)
    elif done == total:  # told once by every stage
        click.echo(f"{stage}: done", err=True)


def _print(run: "CalibrationRun", output: Path) -> None:
    from entmtp.commands.bank import print_bank

    print_bank(run.bank)
    click.echo(f"\n{output}: {len(run.bank.entries)} entries, {output.stat().st_size / 1e6:.1f} MB")
