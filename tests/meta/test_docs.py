"""The pages name everything that is public, and their links lead somewhere."""

import dataclasses
import re
from pathlib import Path

import pytest

from entmtp import errors
from entmtp.bank import BankSource, Calibration, EntryScore
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.topology import named_topologies

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The text of a page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Fragments that the headings of a page can be reached by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in words}


def is_named(name: str, page: Path) -> bool:
    """True where the page has the name as a word of its own."""
    return (
        re.search(rf"(?<!\w){re.escape(name)}(?!\w)", page.read_text(encoding="utf-8")) is not None
    )


def test_every_public_name_is_in_the_api_page() -> None:
    """What `entmtp.__all__` promises is documented."""
    import entmtp

    page = DOCS / "python-api.md"
    assert [name for name in entmtp.__all__ if not is_named(name, page)] == []


def test_every_error_is_in_the_errors_page() -> None:
    """Whoever meets an error can look it up."""
    assert [name for name in errors.__all__ if not is_named(name, DOCS / "errors.md")] == []


def test_every_field_of_a_bank_is_in_its_page() -> None:
    """Whoever reads or writes bank files finds all that is in them."""
    page, classes = DOCS / "bank-format.md", (EntryScore, Calibration, BankSource, CostTable, Trace)
    names = {field.name for one in classes for field in dataclasses.fields(one)}
    names -= {"tokens"}  # of a trace, which a bank leaves out
    names |= {"schema", "entries", "name", "paths", "calibration", "sha256", "depth"}
    assert [name for name in sorted(names) if not is_named(f"`{name}`", page)] == []


def test_every_named_tree_is_in_the_topologies_page() -> None:
    """The trees that ship are listed."""
    page = DOCS / "topologies.md"
    assert [name for name in named_topologies() if not is_named(f"`{name}`", page)] == []


def test_every_page_is_in_the_site() -> None:
    """A page that the navigation leaves out is not found by readers."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in nav] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name a file, and a heading in it; pages of the site link within the site."""
    home = DOCS if DOCS in page.parents else ROOT
    for link in LINK.findall(prose(page)):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(home), f"{link} leaves the site"
        assert not fragment or fragment in anchors(target), link
