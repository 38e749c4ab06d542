"""Promises about files that are not code."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from entmtp.topology import named_topologies
from entmtp.workload import TASKS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "entmtp" / "data"
FOLDERS = (".ci", "benchmarks", "docs", "examples", "src", "tests")

# put together from parts, so that this file does not hold what it looks for
HOMES = "|".join(("home", "root", "Users", "work"))
LOCAL_PATH = re.compile(rf"(?<![\w.~/:}}-])/(?:{HOMES})/\w")
OUTSIDE = "/".join(("..", "shared"))
ORIGIN = [" ".join(words) for words in (("generated", "by", "ai"), ("written", "by", "ai"))]
ORIGIN += ["-".join(words) for words in (("ai", "generated"), ("co", "authored", "by"))]


def text_files() -> Iterator[tuple[Path, str]]:
    """Every file of the project that is text, and what is in it."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted(files):
        if path.name == ".git" or path.suffix in {".pyc", ".safetensors"}:
            continue
        try:
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def test_the_changelog_begins_with_this_version() -> None:
    """A release has its notes, under its own number."""
    import entmtp

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(r"^## \[([^\]]+)\] - (\d{4}-\d{2}-\d{2})$", changelog, flags=re.M)
    assert heading is not None
    assert heading[1] == entmtp.__version__


def test_no_file_names_a_place_on_one_machine() -> None:
    """A path that exists on the author's machine alone helps nobody else."""
    found = [
        str(path)
        for path, text in text_files()
        if OUTSIDE in text or (LOCAL_PATH.search(text) is not None)
    ]
    assert found == []


def test_no_file_tells_how_it_was_made() -> None:
    """Files speak of what they do."""
    found = [
        str(path) for path, text in text_files() if any(word in text.lower() for word in ORIGIN)
    ]
    assert found == []


def test_a_wheel_holds_all_data() -> None:
    """Trees, heads and prompts are found after an installation, not in a clone alone."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    packed = {
        file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()
    }
    data = {path.relative_to(ROOT / "src").as_posix() for path in DATA.rglob("*") if path.is_file()}
    assert {f"entmtp/data/tasks/{task}.jsonl" for task in TASKS if task != "mixed"} < data
    assert data - packed == set()


def test_the_published_tree_is_unchanged() -> None:
    """Numbers of the baseline can be compared only if its tree is the published one."""
    tree = named_topologies()["mc_sim_7b_63"]
    assert tree.digest == "7e63acaa76293e94"
    assert Counter(tree.depths.tolist()) == {0: 1, 1: 10, 2: 28, 3: 23, 4: 2}
