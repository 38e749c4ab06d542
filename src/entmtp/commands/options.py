"""Options that several commands share; defaults come from the parameter classes."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from entmtp.params import SamplingParams, TypicalParams
from entmtp.workload import TASKS, PromptRecord, read_workload

if TYPE_CHECKING:
    from entmtp.engine import Engine

__all__ = [
    "integer_list",
    "load_engine",
    "model_options",
    "prompts_option",
    "read_records",
    "sampling_options",
    "sampling_params",
    "typical_params",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Decorator = Callable[[_Function], _Function]
_DEFAULTS = SamplingParams()

_MODEL_OPTIONS = (
    click.option(
        "--model",
        default="smollm2-135m",
        show_default=True,
        help="A pulled model's name, a Hugging Face folder or id, or a .gguf file; or heads that "
        "name their model.",
    ),
    click.option(
        "--drafter",
        "--heads",
        default="auto",
        show_default=True,
        metavar="[auto|hydra++|hydra|medusa|mtp|lookup|none|PATH]",
        help="Who proposes tokens; mtp is the module in the model's own checkpoint, none is plain "
        "decoding, PATH is a file, folder or Hugging Face id of heads.",
    ),
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        metavar="[auto|native|torch]",
        help="What computes the model; auto: native (int8) on a CPU that suits it, else torch.",
    ),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        metavar="[auto|int8|float32|bfloat16|float16]",
        help="auto: int8 in the native core, float32 in torch on a CPU, bfloat16 on CUDA.",
    ),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="[auto|cpu|cuda]",
        help="auto: CUDA where there is some.",
    ),
    click.option(
        "--isa",
        default="auto",
        show_default=True,
        metavar="[auto|avx512|avx2|portable]",
        help="Instruction set of the native core.",
    ),
)

_THREADS_OPTION = click.option("--threads", type=int, default=None, help="CPU threads.")

_TREE_OPTIONS = (
    click.option(
        "--bank",
        default=None,
        metavar="NAME|FILE",
        help="A bank that 'entmtp calibrate' wrote, or the name of one that ships. If not given: "
        "the shipped 'mixed', where there is one for model and drafter, else three shipped trees.",
    ),
    click.option(
        "--topology",
        default=None,
        metavar="NAME|FILE",
        help="One tree for every step: none, chain4, tree8, tree16, mc_sim_7b_63, a bank entry, "
        "or a JSON list of paths.",
    ),
    click.option(
        "--policy",
        default="auto",
        show_default=True,
        metavar="[auto|plain|fixed|ladder|hysteresis|throughput|dynamic|chain-ema|chain-threshold]",
        help="How the tree of each step is chosen; auto: the fastest by the bank. All but "
        "plain, fixed and hysteresis need a calibrated bank.",
    ),
)

_SAMPLING_OPTIONS = (
    click.option(
        "--max-new-tokens",
        type=int,
        default=_DEFAULTS.max_new_tokens,
        show_default=True,
        help="Most tokens to emit.",
    ),
    click.option(
        "--temperature",
        type=float,
        default=_DEFAULTS.temperature,
        show_default=True,
        help="0 is greedy.",
    ),
    click.option(
        "--top-k", type=int, default=_DEFAULTS.top_k, show_default=True, help="0 keeps all tokens."
    ),
    click.option(
        "--top-p",
        type=float,
        default=_DEFAULTS.top_p,
        show_default=True,
        help="Keep the most probable tokens up to this mass.",
    ),
    click.option(
        "--min-p",
        type=float,
        default=_DEFAULTS.min_p,
        show_default=True,
        help="Drop tokens below this share of the most probable one.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        default=_DEFAULTS.repetition_penalty,
        show_default=True,
        help="Above 1: less of what the prompt or the text already holds.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=_DEFAULTS.presence_penalty,
        show_default=True,
        help="Subtracted once from the logits of tokens in the text.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        default=_DEFAULTS.frequency_penalty,
        show_default=True,
        help="Subtracted for each occurrence in the text.",
    ),
    click.option(
        "--seed", type=int, default=None, help="Of sampling; drawn and reported if not given."
    ),
    click.option("--stop", multiple=True, help="Ends the text before this string; repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token."),
    click.option(
        "--verification",
        type=click.Choice(["exact", "typical"]),
        default="exact",
        show_default=True,
        help="typical is LOSSY: the text is no longer the model's own.",
    ),
    click.option(
        "--posterior-threshold",
        type=float,
        default=TypicalParams().posterior_threshold,
        show_default=True,
        help="Of typical acceptance.",
    ),
    click.option(
        "--posterior-alpha",
        type=float,
        default=TypicalParams().posterior_alpha,
        show_default=True,
        help="Of typical acceptance.",
    ),
)


def prompts_option(*, is_required: bool = True) -> Callable[[_Function], _Function]:
    """Option ``--prompts``: names of tasks and files, for ``workload.read_workload``."""
    # text, not a path: a path would make "code" of "./code", which is a file and not a task
    return click.option(
        "--prompts",
        "workloads",
        multiple=True,
        required=is_required,
        metavar="TASK|FILE",
        help=f"Prompts of the package ({', '.join(TASKS)}) or a file of prompts; repeatable.",
    )


def read_records(workloads: Iterable[str], limit: int | None = None) -> list[PromptRecord]:
    """The records that ``--prompts`` names, at most ``limit`` of each task or file.

    Raises:
        InputError: a task or file that cannot be read.
    """
    return [record for name in workloads for record in read_workload(name, limit)]


def model_options(*, trees: bool = True) -> Callable[[_Function], _Function]:
    """Options that :func:`load_engine` reads; ``trees`` adds threads and the choice of trees."""
    return _adding(_MODEL_OPTIONS + ((_THREADS_OPTION, *_TREE_OPTIONS) if trees else ()))


def sampling_options(function: _Function) -> _Function:
    """Options that :func:`sampling_params` and :func:`typical_params` read."""
    return _adding(_SAMPLING_OPTIONS)(function)


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of ``options``.

    Raises:
        InputError: a value is out of its limits.
    """
    names = SamplingParams.__dataclass_fields__
    values = {name: options.pop(name) for name in names}
    return SamplingParams(**values | {"stop": tuple(values["stop"])})


def typical_params(options: dict[str, Any]) -> TypicalParams | None:
    """Take the verification options out of ``options``; ``None`` is exact verification."""
    threshold, alpha = options.pop("posterior_threshold"), options.pop("posterior_alpha")
    if options.pop("verification") == "exact":
        return None
    return TypicalParams(posterior_threshold=threshold, posterior_alpha=alpha)


def load_engine(options: dict[str, Any], temperature: float | None = None) -> "Engine":
    """An engine as the model options among ``options`` say.

    A bank gets costs of ``temperature``, ``None`` being that of its calibration.

    Commands that have no option of a policy bring schedulers of their own, and need no bank here.

    Raises:
        EntmtpError: a model, heads or trees that cannot be used.
    """
    from entmtp.loading import load

    logging.basicConfig(level=logging.WARNING, format="Note: %(message)s")
    return load(
        options["model"],
        options["drafter"],
        options.get("bank"),
        policy=options.get("policy", "plain"),
        topology=options.get("topology"),
        dtype=options["dtype"],
        device=options["device"],
        backend=options["backend"],
        isa=options["isa"],
        threads=options.get("threads"),
        temperature=temperature,
    )


def integer_list(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...]:
    """Parse ``1,4`` into whole numbers >= 1; nothing gives none."""
    if value is None:
        return ()
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers >= 1, such as 1,4")
    return numbers


def _adding(
    options: Sequence[Callable[[_Function], _Function]],
) -> Callable[[_Function], _Function]:
    def add(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add
