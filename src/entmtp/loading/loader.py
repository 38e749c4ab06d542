"""``load``: from names and files to an engine."""

from pathlib import Path

import torch

from entmtp.bank import Bank, load_bank, shipped_banks
from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits
from entmtp.errors import CheckpointError, InputError
from entmtp.kernels.library import load_library
from entmtp.loading.assets import resolve_model, tokenizer_folder
from entmtp.loading.catalog import home
from entmtp.loading.drafters import load_drafter
from entmtp.loading.heads_source import named_base_model
from entmtp.loading.native import load_native
from entmtp.loading.tokenizers import load_tokenizer
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler, TopologyScheduler, make_scheduler
from entmtp.target.base import Target, TargetConfig
from entmtp.target.llama import LlamaTarget
from entmtp.target.native import MAX_THREADS, NativeTarget
from entmtp.target.native_weights import native_obstacle
from entmtp.target.weights import iter_tensors, read_config
from entmtp.topology import Topology

__all__ = [
    "BACKENDS",
    "DEFAULT_BANK",
    "DTYPES",
    "default_bank",
    "load",
    "load_target",
    "set_threads",
    "use_threads",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("auto", "torch", "native")
DEFAULT_BANK = "mixed"
"""The shipped bank that is used where none is named and it fits."""


def load(  # noqa: PLR0913 - keyword-only beyond the third
    model: str = "smollm2-135m",
    heads: str | Drafter = "auto",
    bank: Bank | str | Path | None = None,
    *,
    policy: str | TopologyScheduler = "auto",
    topology: str | Topology | None = None,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    isa: str = "auto",
    limits: EngineLimits | None = None,
    temperature: float | None = None,
) -> Engine:
    """Make an engine.

    Args:
        model: a pulled model's name, a Hugging Face folder or id, or a .gguf file; or a folder or
            id of heads that names its base model, which is then loaded with them.
        heads: ``auto`` (shipped heads where there are some for this model, else the multi-token
            module in its checkpoint, else prompt lookup), ``hydra++``, ``hydra`` or ``medusa``
            (shipped), ``mtp`` (that module), ``lookup``, ``none`` (plain decoding), a file, folder
            or Hugging Face id of heads, or a drafter of one's own.
        bank: trees to choose from, the name of a shipped bank, or a file; ``None`` takes the
            shipped ``mixed`` where it was made for this model and drafter, else three shipped
            trees. A calibrated bank is first fitted to this process: see
            :mod:`entmtp.calibrate.adapt`.
        policy: a name of :data:`entmtp.scheduler.POLICIES`: ``auto`` (the policy that was fastest
            on the texts which a calibrated bank was not fitted to, else ``hysteresis``),
            ``plain``, ``fixed`` (the best tree of the bank, or the topology), ``hysteresis``, or,
            with a calibrated bank, ``ladder``, ``throughput``, ``dynamic``, ``chain-ema`` or
            ``chain-threshold``; or a scheduler of one's own, which brings its trees: topology and
            bank are then left out.
        topology: one tree for every step: a shipped name, a bank entry, a JSON file or a
            :class:`Topology`; implies ``fixed``.
        dtype: ``int8`` (native), ``float32``, ``bfloat16`` or ``float16`` (torch); ``auto`` is
            int8 in the native core, float32 in torch on a CPU, bfloat16 on CUDA.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes CUDA where there is some.
        backend: ``native`` (int8 on the CPU) or ``torch``; ``auto`` is native on a CPU with a fast
            instruction set where neither dtype nor device asks for torch.
        threads: of the CPU; ``None`` leaves them as they are.
        isa: instruction set of the native core: ``auto``, ``avx512``, ``avx2`` or ``portable``.
        limits: bounds on the work of a step.
        temperature: of the requests that are to come, for which the costs of a calibrated bank are
            probed: sampling makes drafts dearer. ``None`` is that of its calibration.

    Raises:
        EntmtpError: any of the above is missing, damaged or does not fit; the message says how to
            go on.
    """
    if not isinstance(policy, str) and not (topology is None and bank is None):
        raise InputError("a scheduler of one's own has its trees; leave out topology and bank")
    if temperature is not None:
        SamplingParams(temperature=temperature)  # refuses what is no temperature
    if threads is not None:
        set_threads(threads)
    path = resolve_model(model)
    base = named_base_model(path)
    if base is not None:  # a folder of heads
        heads, model = (model if heads == "auto" else heads), base
        path = _base_model(path, base)
    tokenizer = load_tokenizer(tokenizer_folder(path))
    target = load_target(path, dtype=dtype, device=device, backend=backend, isa=isa)
    if tokenizer.vocab_size > target.config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{target.config.vocab_size}; these files do not belong together"
        )
    drafter = heads if not isinstance(heads, str) else load_drafter(heads, target, model)
    engine = Engine(target, drafter, FixedScheduler.plain(), tokenizer, limits)
    if isinstance(policy, str):
        if bank is None and topology is None and policy != "plain":
            bank = default_bank(engine)
        policy = make_scheduler(policy, drafter, _bank_here(bank, engine, temperature), topology)
    engine.scheduler = policy
    return engine


def default_bank(engine: Engine) -> Bank | None:
    """The bank that ships for all kinds of text, where it was made for this model and drafter."""
    file = shipped_banks().get(DEFAULT_BANK)
    if file is None or isinstance(engine.drafter, EmptyDrafter):
        return None
    from entmtp.calibrate.adapt import is_bank_of

    bank = Bank.read(file)
    return bank if is_bank_of(bank, engine) else None


def _bank_here(
    bank: Bank | str | Path | None, engine: Engine, temperature: float | None
) -> Bank | None:
    """The bank with costs of this process; without a drafter no tree is drafted."""
    if bank is None:
        return None
    found = bank if isinstance(bank, Bank) else load_bank(bank)
    if isinstance(engine.drafter, EmptyDrafter):
        return found
    from entmtp.calibrate.adapt import adapt_bank

    return adapt_bank(found, engine, home() / "banks", temperature)


def _base_model(heads: Path, base: str) -> Path:
    """The model that a folder of heads names."""
    path = resolve_model(base)
    if named_base_model(path) is not None:
        raise CheckpointError(
            f"{heads / 'config.json'} names {base} as base_model_name_or_path, which is a folder "
            "of heads again: give the model itself as the model, and the heads as the drafter"
        )
    return path


def load_target(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    isa: str = "auto",
) -> Target:
    """Read a model's weights; arguments as :func:`load`.

    Raises:
        InputError: unknown dtype, device or backend, or values that exclude one another.
        CheckpointError: the weights cannot be used.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if dtype not in ("auto", "int8", *DTYPES):
        raise InputError(f"dtype is {dtype!r}; it must be auto, int8 or one of {', '.join(DTYPES)}")
    place = _device(device)
    config = read_config(path)
    if backend == "auto":
        backend = "native" if _prefers_native(config, dtype, place, isa) else "torch"
    if backend == "native":
        if dtype not in ("auto", "int8") or place.type != "cpu":
            raise InputError(
                f"the native backend computes in int8 on a CPU, not in {dtype} on {place.type}; "
                "use --backend torch"
            )
        return load_native(path, config, threads=min(torch.get_num_threads(), MAX_THREADS), isa=isa)
    if dtype == "int8" or isa != "auto":
        raise InputError("int8 and instruction sets are of the native backend, which is not used")
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    return LlamaTarget(config, iter_tensors(path, config), DTYPES[dtype], place)


def _prefers_native(config: TargetConfig, dtype: str, place: torch.device, isa: str) -> bool:
    """Whether ``auto`` means the native core."""
    library = load_library()
    if place.type != "cpu" or dtype not in ("auto", "int8") or library is None:
        return False
    if dtype == "int8" or isa != "auto":
        return True
    return library.isas[0] != "portable" and native_obstacle(config) is None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device is {name!r}; it must be auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device is {name!r}; it must be auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {name}; {torch.cuda.device_count()} CUDA devices")
    return device


def set_threads(threads: int) -> None:
    """Set the CPU threads of torch for this process.

    Raises:
        InputError: not between 1 and 1024.
    """
    if not 1 <= threads <= 1024:
        raise InputError(f"threads is {threads}; it must be between 1 and 1024")
    torch.set_num_threads(threads)


def use_threads(target: Target, threads: int) -> None:
    """Set the CPU threads of torch and of a target's own pool.

    Raises:
        InputError: fewer than 1, or more than the target can use.
    """
    set_threads(threads)
    if isinstance(target, NativeTarget):
        target.set_threads(threads)
