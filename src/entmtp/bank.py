"""The bank: the set of topologies that a scheduler chooses from. Always contains the empty tree."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from entmtp.errors import BankError, TopologyError
from entmtp.topology import Topology, named_topologies

__all__ = ["SCHEMA_VERSION", "Bank"]

SCHEMA_VERSION = 1
_NONE = "none"


@dataclass(frozen=True)
class Bank:
    """Named topologies.

    Attributes:
        entries: name -> topology, smallest node budget first; ``none`` is the empty tree.
    """

    entries: Mapping[str, Topology]

    @classmethod
    def of(cls, entries: Mapping[str, Topology]) -> "Bank":
        """Make a bank; the empty tree is added where it is missing.

        Raises:
            BankError: ``none`` names a tree that is not empty.
        """
        named = {_NONE: Topology(()), **entries}
        if named[_NONE].num_nodes:
            raise BankError("the entry 'none' must be the empty tree; give this tree another name")
        ordered = sorted(named.items(), key=lambda item: (item[1].num_nodes, item[0]))
        return cls(MappingProxyType(dict(ordered)))

    @classmethod
    def shipped(cls, names: Iterable[str] = ("none", "chain4", "tree16")) -> "Bank":
        """A bank of shipped trees, used where nothing has been calibrated.

        Raises:
            BankError: no tree of that name is shipped.
        """
        trees = cls.of(named_topologies())
        return cls.of({name: trees.get(name) for name in names})

    @classmethod
    def read(cls, file: Path) -> "Bank":
        """Read a bank file: ``{"schema": 1, "entries": {name: [[0], ...]}}``.

        Raises:
            BankError: unreadable, of another schema version, with unknown keys or a bad tree.
        """
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BankError(f"{file}: cannot be read as a bank ({error})") from error
        schema = document.get("schema") if isinstance(document, dict) else None
        if type(schema) is not int or schema != SCHEMA_VERSION:
            raise BankError(f"{file}: not a bank of schema version {SCHEMA_VERSION}")
        unknown = set(document) - {"schema", "entries"}
        if unknown or not isinstance(document.get("entries"), dict):
            raise BankError(
                f"{file}: expected the keys 'schema' and 'entries', found {sorted(document)}"
            )
        try:
            return cls.of({n: Topology.from_paths(p) for n, p in document["entries"].items()})
        except TopologyError as error:
            raise BankError(f"{file}: {error}") from error

    def to_json(self) -> str:
        """The text of a bank file."""
        entries = {name: topology.to_list() for name, topology in self.entries.items()}
        return json.dumps({"schema": SCHEMA_VERSION, "entries": entries})

    def get(self, name: str) -> Topology:
        """One entry.

        Raises:
            BankError: no such entry; names those that exist.
        """
        if name not in self.entries:
            known = ", ".join(self.entries)
            raise BankError(f"the bank has no entry {name!r}; it has {known}")
        return self.entries[name]

    def fitted(self, max_depth: int | None) -> "Bank":
        """The bank with every tree cut to what a drafter can fill; names stay."""
        if max_depth is None:
            return self
        return Bank.of({name: tree.truncate(max_depth) for name, tree in self.entries.items()})
