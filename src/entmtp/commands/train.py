"""``entmtp train``: heads for a model, on text that it writes itself."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from entmtp.commands.options import prompts_option, read_records
from entmtp.commands.train_table import TrainTable
from entmtp.plotting import make_report_folder

if TYPE_CHECKING:
    from entmtp.train import TrainedHeads

__all__ = ["train"]

_DATA_OPTIONS = (
    "num_prompts",
    "max_new_tokens",
    "temperature",
    "samples",
    "sample_temperature",
    "follow_ups",
    "long_answers",
    "long_new_tokens",
    "batch_size",
    "answer_minutes",
)
_RECIPE_OPTIONS = (
    "epochs",
    "num_heads",
    "num_layers",
    "is_tied",
    "hot_vocab_size",
    "embed_scale",
    "head_decay",
    "kl",
    "sampled_tokens",
    "noise",
    "learning_rate",
)


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@prompts_option(is_required=False)
@click.option(
    "--answers",
    "source",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Instead of prompts: the output folder of another run, whose answers are read.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of answers, checkpoints and heads; run again to go on.",
)
@click.option("--kinds", default="hydra,medusa", show_default=True, help="Which heads to train.")
@click.option("--num-prompts", type=int, default=None, help="Prompts to answer.  [default: 1600]")
@click.option("--max-new-tokens", type=int, default=None, help="Longest answer.  [default: 160]")
@click.option("--temperature", type=float, default=None, help="Of the answers.  [default: 0]")
@click.option(
    "--exclude",
    "excluded",
    multiple=True,
    metavar="TASK|FILE",
    help="Prompts that must not be answered, such as those to test on; repeatable.",
)
@click.option(
    "--samples",
    type=int,
    default=None,
    help="Most answers to a prompt, where a task has few prompts.  [default: 1]",
)
@click.option(
    "--sample-temperature", type=float, default=None, help="Of further answers.  [default: 0.8]"
)
@click.option(
    "--follow-ups",
    type=float,
    default=None,
    help="Share of conversations that get a second turn.  [default: 0]",
)
@click.option(
    "--long-answers", type=float, default=None, help="Share of long answers.  [default: 0]"
)
@click.option("--long-new-tokens", type=int, default=None, help="Of these.  [default: 1024]")
@click.option("--answers-only", is_flag=True, help="Write the answers, train nothing yet.")
@click.option(
    "--train-tokens",
    type=int,
    default=None,
    help="Train on whole answers of at most so many tokens together.  [default: all]",
)
@click.option("--batch-size", type=int, default=None, help="Answers at once.  [default: 64]")
@click.option(
    "--answer-minutes",
    type=float,
    default=None,
    help="Stop writing answers after this long; 0 writes all.  [default: 0]",
)
@click.option("--epochs", type=int, default=None, help="Passes over the text.  [default: 3]")
@click.option("--num-heads", type=int, default=None, help="Depths to draft.  [default: 4]")
@click.option("--hot-vocab-size", type=int, default=None, help="Tokens scored.  [default: 8192]")
@click.option("--num-layers", type=int, default=None, help="Blocks a head.  [default: 2]")
@click.option("--tied", "is_tied", is_flag=True, default=None, help="A head's blocks are the same.")
@click.option(
    "--embed-scale", type=float, default=None, help="Of embeddings in Hydra heads.  [default: 8]"
)
@click.option("--head-decay", type=float, default=None, help="Weight of depths.  [default: 0.8]")
@click.option(
    "--kl",
    type=float,
    default=None,
    help="Weight of the divergence from the model's distribution, beside cross-entropy.  "
    "[default: 0]",
)
@click.option(
    "--sampled-tokens",
    type=int,
    default=None,
    help="Rare tokens that a step scores beside the frequent ones; 0 scores all.  [default: 512]",
)
@click.option(
    "--noise", type=float, default=None, help="On the model's states, in training.  [default: 0]"
)
@click.option(
    "--start-from",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=None,
    help="Begin with these heads, of the same kind and sizes, or hydra for hydra++.",
)
@click.option("--learning-rate", type=float, default=None, help="Peak.  [default: 0.001]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder for a plot of accuracy over time (extra bench).",
)
@click.option("--quantize", is_flag=True, help="Store the heads as int8.")
@click.option("--threads", type=int, default=None, help="CPU threads of torch.")
@click.option("--dtype", default="auto", show_default=True, help="Of the model.")
def train(
    model: str,
    workloads: tuple[str, ...],
    source: Path | None,
    folder: Path,
    kinds: str,
    **options: Any,
) -> None:
    """Train heads on the model's own answers: medusa, hydra, hydra++ or mtp."""
    _check_usage(workloads, source, options)
    from entmtp.loading.assets import resolve_model, tokenizer_folder
    from entmtp.loading.loader import load_target, set_threads
    from entmtp.loading.tokenizers import load_tokenizer
    from entmtp.train import DataConfig, HeadsRecipe, TrainConfig, train_heads, write_answers

    data = _changed(DataConfig(seed=options["seed"]), options, _DATA_OPTIONS)
    recipes = tuple(
        _changed(HeadsRecipe(kind=kind.strip(), seed=options["seed"]), options, _RECIPE_OPTIONS)
        for kind in kinds.split(",")
    )
    name, report = Path(model).name, options["report"]
    config = TrainConfig(
        name,
        recipes,
        options["quantize"],
        train_tokens=options["train_tokens"],
        start_from=options["start_from"],
    )
    names = (*workloads, *options["excluded"])
    read_records(names, limit=1)  # a wrong name should not have to wait for the model
    if report is not None:
        make_report_folder(report)
    if options["threads"] is not None:
        set_threads(options["threads"])
    path = resolve_model(model)
    tokenizer = load_tokenizer(tokenizer_folder(path))
    target = load_target(path, dtype=options["dtype"])
    with TrainTable(is_terminal=sys.stderr.isatty()) as table:
        if source is None:
            write_answers(
                target,
                tokenizer,
                workloads,
                folder,
                data,
                table,
                model_name=name,
                exclude=options["excluded"],
            )
        if options["answers_only"]:
            click.echo(f"{folder / 'answers'}: written")
            return
        trained = train_heads(target, source or folder, folder, config, table)
    _print_results(trained, report)


def _check_usage(workloads: tuple[str, ...], source: Path | None, options: dict[str, Any]) -> None:
    """Refuse options that say nothing, or contradict one another."""
    if source is None and not workloads:
        raise click.UsageError("Missing option '--prompts', or '--answers'.")
    flags = {p.name: p.opts[0] for p in click.get_current_context().command.params}
    given = [flags[name] for name in _DATA_OPTIONS if options[name] is not None]
    given += ["--exclude"] if options["excluded"] else []
    given += ["--prompts"] if workloads else []
    given += ["--answers-only"] if options["answers_only"] else []
    if source is not None and given:
        raise click.UsageError(
            f"{given[0]} is about answers that are written; with --answers they are read."
        )
    if options["start_from"] is not None and options["hot_vocab_size"] is not None:
        raise click.UsageError(
            "--hot-vocab-size is that of the heads of --start-from; leave it out."
        )
    for name in ("train_tokens", "start_from", "report"):
        if options["answers_only"] and options[name] is not None:
            raise click.UsageError(f"{flags[name]} is about training; leave out --answers-only.")


def _changed(config: Any, options: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The config with the options that were given."""
    return replace(config, **{n: options[n] for n in names if options[n] is not None})


def _print_results(trained: "list[TrainedHeads]", report: Path | None) -> None:
    """A table of accuracies for each kind; then the plot, where one is wanted."""
    for heads in trained:
        click.echo(f"{heads.kind}: {heads.file}")
        click.echo(f"{'head':>8}{'top-1':>8}{'top-2':>8}{'top-4':>8}{'top-8':>8}{'positions':>12}")
        pairs = zip(heads.accuracy.top, heads.accuracy.num_positions, strict=True)
        for index, (top, count) in enumerate(pairs, start=1):
            shares = "".join(f"{share:8.3f}" for share in top)
            click.echo(f"{index:8d}{shares}{count:12d}")
    if report is not None:
        from entmtp.train.plots import plot_history

        file = plot_history({heads.kind: heads.history for heads in trained}, report)
        click.echo(f"plot: {file}")
