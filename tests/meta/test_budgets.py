"""Sizes that keep the code readable: what a linter does not count."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_FUNCTION = 60
MAX_MODULE = 500

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Path) -> Iterator[Function]:
    """All functions of a module, methods and nested ones included."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_lines(function: Function) -> int:
    """Lines of a function, its docstring apart."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_functions_and_modules_stay_small(module: Path) -> None:
    """A function fits on a screen, and a module is read in one sitting."""
    long = {f.name: size for f in functions(module) if (size := num_lines(f)) > MAX_FUNCTION}
    assert long == {}
    assert len(module.read_text(encoding="utf-8").splitlines()) <= MAX_MODULE
