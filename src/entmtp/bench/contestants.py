"""From methods to systems that decode: drafters, banks and peers are loaded here, once each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entmtp.bank import Bank
from entmtp.bench.banks import TaskBank
from entmtp.bench.memory import resident_bytes
from entmtp.bench.methods import PLAIN, Method
from entmtp.bench.peer_setting import PeerSetting
from entmtp.bench.peers import COPIED_TOKENS, open_peer, peer_obstacle
from entmtp.bench.systems import EngineSystem, System, policy_of
from entmtp.bench.tasks import Task
from entmtp.calibrate.pareto import predicted_rate
from entmtp.calibrate.summary import unpack_trace
from entmtp.drafters.base import Drafter, check_depth
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.engine import Engine, EngineLimits
from entmtp.errors import EntmtpError, InputError
from entmtp.loading.drafters import load_drafter
from entmtp.params import TypicalParams
from entmtp.scheduler import FixedScheduler, TopologyScheduler, make_scheduler
from entmtp.topology import Topology, named_topologies

__all__ = ["Contestants", "Heads", "best_entry"]

PUBLISHED_TREE = "mc_sim_7b_63"

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Heads:
    """What is drafted with.

    Attributes:
        model: name of the model, whose shipped heads are meant by a kind.
        path: folder or .gguf file of the model.
        medusa: heads of the method ``medusa``: a kind, a file, a folder or a Hugging Face id.
        hydra: heads of the method ``hydra``.
        banks: calibrated for the heads of the engine, by the name of a task; ``""`` is for all
            others.
    """

    model: str
    path: Path
    medusa: str = "medusa"
    hydra: str = "hydra"
    banks: Mapping[str, TaskBank] = field(default_factory=dict)

    def bank_of(self, task: Task) -> Bank | None:
        """The bank of a task."""
        found = self.banks.get(task.name, self.banks.get(""))
        return None if found is None else found.bank


class Contestants:
    """The methods of a run; what cannot run here is left out, and said."""

    def __init__(
        self,
        engine: Engine,
        heads: Heads,
        peers: PeerSetting,
        typical: TypicalParams | None,
        notice: Notice,
    ) -> None:
        """Load nothing yet.

        Args:
            engine: its target decodes all, its drafter is that of ``--drafter``.
            heads: of the published systems, and banks.
            peers: what other programs decode with.
            typical: lossy typical acceptance where something is drafted; exact without.
            notice: told of each method that is left out, and why.
        """
        self.engine, self.heads = engine, heads
        self.peers, self._typical, self.notice = peers, typical, notice
        self._drafters: dict[str, Drafter] = {"none": EmptyDrafter(), "own": engine.drafter}
        self._programs: dict[str, System] = {}
        self._schedulers: dict[tuple[str, str], TopologyScheduler] = {}
        self._kept: dict[tuple[str, str], str] = {}
        self.left_out: dict[str, str] = {}
        self.loaded_bytes: dict[str, int] = {}

    def systems(
        self, methods: Sequence[Method], task: Task, *, is_strict: bool
    ) -> dict[str, System]:
        """Systems by method.

        Args:
            methods: that are wanted.
            task: whose bank is taken.
            is_strict: whether a method of this program that cannot run is an error; peers that
                are missing never are.

        Raises:
            EntmtpError: such a method cannot run.
        """
        found: dict[str, System] = {}
        for method in methods:
            try:
                reason = None if method.peer is None else peer_obstacle(method, self.peers)
                if reason is None:
                    found[method.name] = self._system(method, task)
            except EntmtpError as error:
                if is_strict and method.peer is None:
                    raise InputError(f"method {method.name}: {error}") from error
                reason = str(error)
            if reason is not None and method.name not in self.left_out:
                self.left_out[method.name] = reason
                self.notice(f"{method.name} left out: {reason}")
        return found

    def keep(self, task: Task, policies: Mapping[str, str]) -> None:
        """Stay with what methods came down to in an earlier process of the same run.

        ``auto``, ``fixed`` and ``hydra-best`` depend on the costs of the process, so that they may
        come down to something else here; rows of both must not be mixed.

        Args:
            task: that they are of; none of its schedulers is made yet.
            policies: by method.
        """
        self._kept |= {(task.name, method): policy for method, policy in policies.items()}

    def scheduler(self, method: Method, task: Task) -> TopologyScheduler:
        """What chooses the trees of a method: the one place where methods become schedulers.

        Raises:
            EntmtpError: it needs heads or a bank that are not there, or do not fit.
        """
        key = task.name, method.name
        if key not in self._schedulers:
            found = self._scheduler(method, task)
            here, kept = policy_of(found), self._kept.get(key)
            if kept is not None and kept != here:
                self.notice(
                    f"{method.name} on {task.name} stays {kept}, as in the prompts that were done "
                    f"before; by the costs of this process it would be {here} (--fresh starts over)"
                )
                found = self._kept_scheduler(kept, method, task)
            self._schedulers[key] = found
        return self._schedulers[key]

    def _scheduler(self, method: Method, task: Task) -> TopologyScheduler:
        drafter, bank = self.drafter(method), self.heads.bank_of(task)
        if method.policy == "published":
            depth = drafter.max_depth
            tree = named_topologies()[PUBLISHED_TREE]
            tree = tree if depth is None else tree.truncate(depth)
            check_depth(drafter, tree)
            return FixedScheduler(PUBLISHED_TREE, tree)
        if method.policy == "copies":
            return FixedScheduler("copies", Topology.chain(COPIED_TOKENS))
        if method.needs_bank and (bank is None or bank.calibration is None):
            raise InputError(
                "it needs a calibrated bank: make one with 'entmtp calibrate', name it with --bank"
            )
        if method.policy == "best":
            assert bank is not None  # noqa: S101 - methods that take the best tree need a bank
            fitted = bank.fitted(drafter.max_depth)
            name = best_entry(bank, task)
            return FixedScheduler(name, fitted.get(name))
        return make_scheduler(method.policy, drafter, bank)

    def _kept_scheduler(self, kept: str, method: Method, task: Task) -> TopologyScheduler:
        """By what :func:`policy_of` said of it."""
        drafter, bank = self.drafter(method), self.heads.bank_of(task)
        policy, is_fixed, name = kept.partition(":")
        if policy == PLAIN:
            return FixedScheduler.plain()
        if is_fixed:
            assert bank is not None  # noqa: S101 - without one there is nothing to choose from
            return FixedScheduler(name, bank.fitted(drafter.max_depth).get(name))
        return make_scheduler(policy, drafter, bank)

    def drafter(self, method: Method) -> Drafter:
        """Who drafts for a method; loaded when it is first asked for.

        Raises:
            EntmtpError: there are no such heads, or they do not fit.
        """
        kind = method.heads
        if kind == "own" and isinstance(self.engine.drafter, EmptyDrafter):
            raise InputError("it needs heads, and the drafter is none: name some with --drafter")
        if kind not in self._drafters:
            before = resident_bytes()
            self._drafters[kind] = self._shared(self._load(kind))
            self._note_memory(method, before)
        return self._drafters[kind]

    def _load(self, kind: str) -> Drafter:
        if kind == "lookup":
            return PromptLookupDrafter()
        return load_drafter(getattr(self.heads, kind), self.engine.target, self.heads.model)

    def _shared(self, drafter: Drafter) -> Drafter:
        """The heads of the engine where these are the same: two copies lie in other memory."""
        own = self.engine.drafter
        is_same = (drafter.name, drafter.digest) == (own.name, own.digest)
        return own if is_same else drafter

    def _system(self, method: Method, task: Task) -> System:
        if method.peer is not None:
            if method.name not in self._programs:
                before = resident_bytes()
                self._programs[method.name] = open_peer(method, self.peers)
                self._note_memory(method, before)
            return self._programs[method.name]
        engine = Engine(
            self.engine.target,
            self.drafter(method),
            self.scheduler(method, task),
            self.engine.tokenizer,
            EngineLimits(max_batch_size=1),
        )
        return EngineSystem(engine, self._typical if method.heads != "none" else None)

    def _note_memory(self, method: Method, before: int | None) -> None:
        after = resident_bytes()
        if before is not None and after is not None and method.peer != "vllm":  # another process
            self.loaded_bytes[method.name] = after - before


def best_entry(bank: Bank, task: Task) -> str:
    """Name of the bank's entry with the most tokens/s on the texts of a task.

    Predicted from those traced texts of the bank's fitting half that are of the task's kind; from
    all of them where none is.
    """
    calibration = bank.calibration
    assert calibration is not None  # noqa: S101 - whoever asks has looked
    fitting, _ = unpack_trace(calibration.trace).halves()
    texts = [text for text, kind in enumerate(fitting.tasks) if kind in task.kinds]
    if not texts or calibration.settings.get("verification") == "typical":
        return bank.best
    part = fitting.select(texts)
    rates = {
        name: predicted_rate(part, tree, calibration.costs) for name, tree in bank.entries.items()
    }
    return max(rates, key=lambda name: rates[name])
