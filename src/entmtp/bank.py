"""The bank: the set of topologies that a scheduler chooses from. Always contains the empty tree.

A bank may be a bare list of trees, or calibrated: then it also says what each tree gives, what
steps cost, on which machine, for which model and heads, and it carries the traced texts in short,
from which it can be fitted again.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from entmtp.costs import CostTable
from entmtp.errors import BankError, TopologyError
from entmtp.files import write_text
from entmtp.topology import Topology, named_topologies

__all__ = [
    "NONE",
    "SCHEMA_VERSION",
    "Bank",
    "BankSource",
    "Calibration",
    "EntryScore",
    "load_bank",
    "shipped_banks",
]

SCHEMA_VERSION = 2
NONE = "none"
"""Name of the empty tree."""

_KEYS = {"schema", "entries", "calibration", "sha256"}


@dataclass(frozen=True)
class EntryScore:
    """What a tree gives; ``None`` where it was not found out.

    Attributes:
        accept_joint: tokens a step that the joint score promised when the tree was grown.
        accept_own: tokens a step of its own rollout.
        step_ms: milliseconds of a step.
        tokens_per_s: predicted from the two.
        measured_tokens_per_s: decoded end to end, on the prompts of the check.
        predicted_on_check: predicted for exactly those texts, at the pace of the machine then.
        time_ratio: predicted over measured time there, median over texts.
        source: why it is in the bank: ``best`` (most tokens/s), ``pareto`` (throughput frontier),
            ``signal`` (best in some interval of the signal), ``task`` (best of a task), ``chain``,
            ``plain``, ``frontier`` (acceptance frontier).
    """

    accept_joint: float | None = None
    accept_own: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    measured_tokens_per_s: float | None = None
    predicted_on_check: float | None = None
    time_ratio: float | None = None
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class BankSource:
    """What a calibrated bank belongs to.

    Attributes:
        model: name of the target.
        model_digest: tells apart targets of one name.
        drafter: name of the drafter.
        drafter_digest: tells apart drafters of one name.
        backend: that computed the target.
        precision: of its products.
        device: processor, or name of the GPU.
        threads: of the CPU.
    """

    model: str
    model_digest: str
    drafter: str
    drafter_digest: str
    backend: str
    precision: str
    device: str
    threads: int


@dataclass(frozen=True)
class Calibration:
    """What is known of a bank beyond its trees.

    Attributes:
        source: what it belongs to.
        costs: of steps on that machine.
        context: committed tokens at the mean step of the traced texts.
        trace: the traced texts in short, from :mod:`entmtp.calibrate.summary`.
        settings: how it was calibrated.
        provenance: versions and command line.
        policies: by policy ``params``, ``fit_tokens_per_s`` and ``check_tokens_per_s`` on the texts
            of both halves, and ``headroom_share``; ``clairvoyant`` is the bound. Empty where trees
            were scored by decoding.
    """

    source: BankSource
    costs: CostTable
    context: float
    trace: Mapping[str, Any]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    policies: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"source": asdict(self.source), "costs": self.costs.as_dict()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Calibration":
        """Read what :meth:`as_dict` gave.

        Raises:
            BankError: not that.
        """
        try:
            source = BankSource(**document["source"])
            costs = CostTable.from_dict(document["costs"])
            return cls(**{**document, "source": source, "costs": costs})
        except (KeyError, TypeError) as error:
            raise BankError(f"calibration: a field is missing or unknown ({error})") from error


@dataclass(frozen=True)
class Bank:
    """Named topologies.

    Attributes:
        entries: name -> topology, smallest node budget first; ``none`` is the empty tree.
        scores: name -> what is known of it; empty without a calibration.
        calibration: where the bank was calibrated.
    """

    entries: Mapping[str, Topology]
    scores: Mapping[str, EntryScore] = field(default_factory=lambda: MappingProxyType({}))
    calibration: Calibration | None = None

    @classmethod
    def of(
        cls,
        entries: Mapping[str, Topology],
        scores: Mapping[str, EntryScore] | None = None,
        calibration: Calibration | None = None,
    ) -> "Bank":
        """Make a bank; the empty tree is added where it is missing.

        Raises:
            BankError: ``none`` names a tree that is not empty.
        """
        named = {NONE: Topology(()), **entries}
        if named[NONE].num_nodes:
            raise BankError("the entry 'none' must be the empty tree; give this tree another name")
        ordered = sorted(named.items(), key=lambda item: (item[1].num_nodes, item[0]))
        kept = {name: (scores or {})[name] for name, _ in ordered if name in (scores or {})}
        return cls(MappingProxyType(dict(ordered)), MappingProxyType(kept), calibration)

    @classmethod
    def shipped(cls, names: Iterable[str] = (NONE, "chain4", "tree16")) -> "Bank":
        """A bank of shipped trees, used where nothing has been calibrated.

        Raises:
            BankError: no tree of that name is shipped.
        """
        trees = cls.of(named_topologies())
        return cls.of({name: trees.get(name) for name in names})

    @classmethod
    def read(cls, file: Path) -> "Bank":
        """Read a bank file.

        A bare one is ``{"schema": 2, "entries": [{"name": ..., "paths": [[0], ...]}, ...]}``.

        Raises:
            BankError: unreadable, of another schema version, with unknown keys, a wrong checksum
                or a bad tree.
        """
        try:
            text = file.read_text(encoding="utf-8")
            document = json.loads(text, parse_constant=_refuse_constant)
        except (OSError, ValueError, RecursionError) as error:
            hint = "" if isinstance(error, OSError) else "cut off, or something else: "
            raise BankError(f"{file}: cannot be read as a bank ({hint}{error})") from error
        try:
            return _from_document(document)
        except (BankError, TopologyError) as error:
            raise BankError(f"{file}: {error}") from error

    def write(self, file: Path) -> None:
        """Write a bank file, atomically.

        Raises:
            BankError: it cannot be written.
        """
        try:
            write_text(file, self.to_json())
        except OSError as error:
            raise BankError(f"{file}: cannot be written ({error})") from error

    def to_json(self) -> str:
        """The text of a bank file."""
        entries = [
            {"name": name, "paths": tree.to_list(), **_score_fields(self.scores.get(name))}
            for name, tree in self.entries.items()
        ]
        document: dict[str, Any] = {"schema": SCHEMA_VERSION, "entries": entries}
        if self.calibration is not None:
            document["calibration"] = self.calibration.as_dict()
            document["sha256"] = _checksum(document)
        return json.dumps(document, allow_nan=False)

    def get(self, name: str) -> Topology:
        """One entry.

        Raises:
            BankError: no such entry; names those that exist.
        """
        if name not in self.entries:
            known = ", ".join(self.entries)
            raise BankError(f"the bank has no entry {name!r}; it has {known}")
        return self.entries[name]

    @property
    def best(self) -> str:
        """Name of the entry with the most tokens/s, the empty tree included.

        Raises:
            BankError: nothing is known of the entries.
        """
        rates = {name: score.tokens_per_s or 0.0 for name, score in self.scores.items()}
        if not any(rates.values()):
            raise BankError("the bank is not calibrated, so none of its trees is known as the best")
        return max(rates, key=lambda name: rates[name])

    def fitted(self, max_depth: int | None) -> "Bank":
        """The bank with every tree cut to what a drafter can fill; names stay."""
        if max_depth is None:
            return self
        trees = {name: tree.truncate(max_depth) for name, tree in self.entries.items()}
        return Bank.of(trees, self.scores, self.calibration)


def shipped_banks() -> dict[str, Path]:
    """Name -> file of the calibrated banks that ship."""
    folder = Path(__file__).parent / "data" / "banks"
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def load_bank(name_or_file: str | Path) -> Bank:
    """A shipped bank by name, or a bank file.

    Raises:
        BankError: neither a known name nor a readable file, or not a bank.
    """
    shipped = shipped_banks()
    if str(name_or_file) in shipped:
        return Bank.read(shipped[str(name_or_file)])
    file = Path(name_or_file)
    if not file.exists():
        known = ", ".join(shipped) or "none"
        raise BankError(
            f"no bank {str(name_or_file)!r}: neither a file nor one of those that ship ({known}); "
            "make one with 'entmtp calibrate'"
        )
    return Bank.read(file)


def _from_document(document: object) -> Bank:
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(schema) is not int or schema != SCHEMA_VERSION:
        raise BankError(
            f"not a bank of schema version {SCHEMA_VERSION} (found {schema!r:.40}); make one with "
            "'entmtp calibrate'"
        )
    unknown = set(document) - _KEYS
    if unknown or not isinstance(document.get("entries"), list):
        raise BankError(
            f"expected a list of entries and the keys {', '.join(sorted(_KEYS))}, found "
            f"{', '.join(sorted(map(str, document)))}"
        )
    calibration = None
    has_sum = "sha256" in document or document.get("calibration") is not None
    if has_sum and document.get("sha256") != _checksum(document):
        raise BankError(
            "its checksum is wrong: the file was edited or damaged; calibrate again, or keep only "
            "schema and entries"
        )
    if document.get("calibration") is not None:
        calibration = Calibration.from_dict(document["calibration"])
    trees, scores = _read_entries(document["entries"])
    return Bank.of(trees, scores, calibration)


def _read_entries(
    entries: Sequence[object],
) -> tuple[dict[str, Topology], dict[str, EntryScore]]:
    trees: dict[str, Topology] = {}
    scores: dict[str, EntryScore] = {}
    allowed = {"name", "paths", "num_nodes", *EntryScore.__dataclass_fields__}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise BankError("every entry must be an object with a name and paths")
        name = entry["name"]
        if name in trees:
            raise BankError(f"the entry {name!r} occurs twice; give each tree a name of its own")
        unknown = set(entry) - allowed
        if unknown or "paths" not in entry:
            raise BankError(
                f"entry {name!r}: it needs paths and may have {', '.join(sorted(allowed))}; found "
                f"{', '.join(sorted(map(str, entry)))}"
            )
        trees[name] = Topology.from_paths(entry["paths"])
        known = {key: value for key, value in entry.items() if key in allowed}
        for key in ("name", "paths", "num_nodes"):
            known.pop(key, None)
        if known:
            scores[name] = _read_score(name, known)
    return trees, scores


def _read_score(name: str, known: Mapping[str, Any]) -> EntryScore:
    source = known.get("source", ())
    if not isinstance(source, list | tuple) or not all(isinstance(one, str) for one in source):
        raise BankError(f"entry {name!r}: source is {source!r:.80}; it must be a list of names")
    for key, value in known.items():
        is_number = type(value) in (int, float) and math.isfinite(value)
        if key != "source" and value is not None and not is_number:
            raise BankError(f"entry {name!r}: {key} is {value!r:.80}; it must be a finite number")
    return EntryScore(**{**known, "source": tuple(source)})


def _score_fields(score: EntryScore | None) -> dict[str, Any]:
    return {} if score is None else asdict(score)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the checksum itself."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
