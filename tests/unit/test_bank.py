"""The bank: its entries, its file, and what is refused."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.bank import SCHEMA_VERSION, Bank, load_bank
from entmtp.errors import BankError
from entmtp.topology import Topology, named_topologies
from strategies import banks

PAIR = Topology.from_paths([[0], [1]])

BAD_FILES = {
    "empty": ("", "cannot be read as a bank"),
    "cut off": ('{"schema": 2', "cannot be read as a bank"),
    "too deep": ("[" * 100_000, "cannot be read as a bank"),
    "list": ("[]", "not a bank of schema version 2"),
    "no schema": ('{"entries": []}', "not a bank of schema version 2"),
    "earlier schema": ('{"schema": 1, "entries": {}}', "not a bank of schema version 2"),
    "unknown key": (
        '{"schema": 2, "entries": [], "policy": 0}',
        "keys calibration, entries, schema, sha256, found entries, policy, schema",
    ),
    "no entries": ('{"schema": 2}', "expected a list of entries"),
    "entries in an object": ('{"schema": 2, "entries": {}}', "expected a list of entries"),
    "entry without a name": ('{"schema": 2, "entries": [{"paths": []}]}', "with a name and paths"),
    "entry without paths": (
        '{"schema": 2, "entries": [{"name": "t"}]}',
        "entry 't': it needs paths",
    ),
    "unknown field": (
        '{"schema": 2, "entries": [{"name": "t", "paths": [], "speed": 1}]}',
        "found name, paths, speed",
    ),
    "twice": (
        '{"schema": 2, "entries": [{"name": "t", "paths": []}, {"name": "t", "paths": []}]}',
        "'t' occurs twice",
    ),
    "bad tree": (
        '{"schema": 2, "entries": [{"name": "t", "paths": [[0, 1]]}]}',
        "lacks its prefix",
    ),
    "tree named none": (
        '{"schema": 2, "entries": [{"name": "none", "paths": [[0]]}]}',
        "must be the empty tree",
    ),
    "calibration without checksum": (
        '{"schema": 2, "entries": [], "calibration": {}}',
        "its checksum is wrong",
    ),
}


def read_text(text: str) -> Bank:
    """Read a bank from a file with this text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bank.json"
        file.write_text(text)
        return Bank.read(file)


def test_entries_come_smallest_first() -> None:
    """The order is by node budget, then by name."""
    chain = Topology.from_paths([[0], [0, 0]])
    bank = Bank.of({"pair": PAIR, "chain": chain, "one": Topology.from_paths([[0]])})
    assert list(bank.entries) == ["none", "one", "chain", "pair"]


@given(banks())
def test_the_empty_tree_is_always_there(bank: Bank) -> None:
    """Speculation can be switched off at any step."""
    assert bank.get("none") == Topology(())
    assert next(iter(bank.entries.values())).num_nodes == 0


def test_none_names_only_the_empty_tree() -> None:
    """A tree with nodes needs another name."""
    with pytest.raises(BankError, match="'none' must be the empty tree"):
        Bank.of({"none": PAIR})


def test_entries_cannot_be_changed() -> None:
    """A bank is shared by all sequences."""
    source = {"pair": PAIR}
    bank = Bank.of(source)
    source.clear()
    assert list(bank.entries) == ["none", "pair"]
    with pytest.raises(TypeError):
        bank.entries["more"] = PAIR  # type: ignore[index]


def test_unknown_entry() -> None:
    """The error lists the entries that exist."""
    with pytest.raises(BankError, match="no entry 'tree'; it has none, pair"):
        Bank.of({"pair": PAIR}).get("tree")


def test_shipped_bank() -> None:
    """Without a calibration there are the empty tree, a chain and a tree."""
    bank = Bank.shipped()
    assert list(bank.entries) == ["none", "chain4", "tree16"]
    assert bank.get("tree16") == named_topologies()["tree16"]


def test_shipped_bank_of_chosen_trees() -> None:
    """Any of the shipped trees may be asked for, and the empty one comes with them."""
    assert list(Bank.shipped(["mc_sim_7b_63", "tree8"]).entries) == [
        "none",
        "tree8",
        "mc_sim_7b_63",
    ]


def test_shipped_bank_of_an_unknown_tree() -> None:
    """The error lists the trees that exist."""
    with pytest.raises(BankError, match="no entry 'tree9'; it has none, chain4, tree8"):
        Bank.shipped(["tree9"])


@given(banks())
def test_a_file_round_trips(bank: Bank) -> None:
    """A bank written and read again is equal."""
    assert read_text(bank.to_json()) == bank


def test_the_file_states_its_schema() -> None:
    """It is JSON with a version and lists of paths."""
    document = json.loads(Bank.of({"pair": PAIR}).to_json())
    entries = [{"name": "none", "paths": []}, {"name": "pair", "paths": [[0], [1]]}]
    assert document == {"schema": SCHEMA_VERSION, "entries": entries}


@pytest.mark.parametrize("case", BAD_FILES)
def test_what_is_no_bank_is_refused(case: str) -> None:
    """The error says what was expected."""
    text, message = BAD_FILES[case]
    with pytest.raises(BankError, match=message):
        read_text(text)


@pytest.mark.parametrize("case", BAD_FILES)
def test_the_error_names_the_file(case: str, tmp_path: Path) -> None:
    """A user of several banks sees which one is meant."""
    file = tmp_path / "bank.json"
    file.write_text(BAD_FILES[case][0])
    with pytest.raises(BankError, match=r"bank\.json: "):
        Bank.read(file)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    """A missing file and a folder are told as such."""
    with pytest.raises(BankError, match="cannot be read as a bank"):
        Bank.read(tmp_path / name)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are no bank."""
    file = tmp_path / "bank.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BankError, match="cannot be read as a bank"):
        Bank.read(file)


@given(banks(), st.integers(0, 4))
def test_fitted_bank_keeps_names_and_cuts_trees(bank: Bank, depth: int) -> None:
    """Every entry stays under its name, no deeper than the drafter can fill."""
    fitted = bank.fitted(depth)
    assert fitted.entries.keys() == bank.entries.keys()
    assert all(fitted.get(name) == tree.truncate(depth) for name, tree in bank.entries.items())


def test_a_drafter_without_limit_fits_every_tree() -> None:
    """The bank stays the object that it was."""
    bank = Bank.shipped()
    assert bank.fitted(None) is bank


def test_a_name_that_is_no_bank() -> None:
    """The error says that it is neither shipped nor a file."""
    with pytest.raises(BankError, match="no bank 'nowhere': neither a file nor one of those"):
        load_bank("nowhere")


def test_a_bare_bank_has_no_best_tree() -> None:
    """Nothing is known of the trees of a bare list."""
    with pytest.raises(BankError, match="not calibrated"):
        _ = Bank.shipped().best
