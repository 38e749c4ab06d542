"""The native library: built, missing, damaged; options of load; packed weights on disk."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from entmtp.errors import AssetError, EntmtpError, InputError, UnsupportedModelError
from entmtp.kernels import build as builder
from entmtp.kernels.build import BuildError, build, find_compiler, library_file
from entmtp.kernels.library import load_library, missing_reason
from entmtp.loading.loader import load_target
from entmtp.loading.native import load_native, packed_file
from entmtp.target.base import Target
from entmtp.target.llama import LlamaTarget
from entmtp.target.native import MAX_THREADS, NativeTarget
from entmtp.target.weights import read_config
from native_build_cases import copy_package, needs_compiler, python
from native_cases import ISAS, LIBRARY, needs_library
from tiny_gguf import make_tensors, write_gguf
from tiny_model import make_model_folder

FITS = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1}
IS_FAST = bool(ISAS) and ISAS[0] != "portable"
needs_fast = pytest.mark.skipif(not IS_FAST, reason="auto takes the core only where it is fast")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the core accepts."""
    return make_model_folder(tmp_path_factory.mktemp("model"), **FITS)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that it does not: heads of 8."""
    return make_model_folder(tmp_path_factory.mktemp("odd"))


# -- building --------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
def test_the_library_is_built_into_any_folder(tmp_path: Path) -> None:
    """Whole, alone, and it loads; a package that holds it names what this CPU runs."""
    out = build(tmp_path / library_file().name, ["-O1"])
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    folder = copy_package(tmp_path / "copy", out)
    done = python(folder, "from entmtp.kernels.library import *; print(load_library().isas)")
    assert "portable" in done.stdout, done.stderr
    if LIBRARY is not None:
        assert done.stdout.strip() == str(ISAS)


@pytest.mark.parametrize("name", ["nonsense", "c++"])
def test_without_a_compiler_nothing_is_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names what was looked for, and no file."""
    monkeypatch.setenv("CXX", name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=rf"^no C\+\+ compiler \({name.replace('+', '.')}\).*$"):
        build(tmp_path / "x.so")
    monkeypatch.delenv("CXX")
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler \(c\+\+, g\+\+ or clang\+\+\).*$"):
        find_compiler()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("false") is None, reason="there is no program `false`")
def test_a_compiler_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor takes away the library that was there."""
    monkeypatch.setenv("CXX", "false")
    (tmp_path / "x.so").write_text("old")
    with pytest.raises(BuildError, match=r"false failed: exit code 1$"):
        build(tmp_path / "x.so")
    assert (tmp_path / "x.so").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@needs_compiler
def test_a_compiler_s_error_is_one_line(tmp_path: Path) -> None:
    """The first one that it printed."""
    with pytest.raises(BuildError, match=r"^[^\n]*failed: [^\n]*no-such-flag[^\n]*$"):
        build(tmp_path / "x.so", ["--no-such-flag"])
    assert list(tmp_path.iterdir()) == []


def test_the_program_says_what_went_wrong() -> None:
    """Exit code 1 and a sentence, no traceback."""
    done = subprocess.run(
        [sys.executable, builder.__file__],
        env={**os.environ, "CXX": "nonsense"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: no C++ compiler (nonsense) was found\n"


# -- a library that does not load ------------------------------------------------------------------

REPORT = """
import sys
from pathlib import Path
from entmtp.errors import InputError
from entmtp.kernels.library import load_library, missing_reason
from entmtp.loading.loader import load_target
print(load_library(), missing_reason(), sep="|")
print(load_target(Path(sys.argv[-1])).backend)
try:
    load_target(Path(sys.argv[-1]), backend="native")
except InputError as error:
    print(error)
"""


def report(folder: Path, model: Path) -> list[str]:
    """What a package says about its library: the reason, auto's backend, native's error."""
    done = python(folder, f"import sys; sys.argv.append({str(model)!r})\n{REPORT}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "content", [None, b"", b"not a library" * 50], ids=["none", "empty", "text"]
)
def test_a_library_that_does_not_load_is_done_without(
    content: bytes | None, model: Path, tmp_path: Path
) -> None:
    """Torch under auto; under native an error with the reason and the way out."""
    reason, backend, error = report(copy_package(tmp_path, content), model)
    expected = "was not built" if content is None else "does not load here"
    assert reason.startswith("None|the native library")
    assert expected in reason
    assert backend == "torch-cpu"
    assert error.startswith("the native backend cannot run: the native library")
    assert expected in error
    assert error.endswith("use --backend torch")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["foreign", "old"])
def test_a_library_of_another_kind_is_done_without(kind: str, model: Path, tmp_path: Path) -> None:
    """One without our functions, and one of another version of the interface."""
    sources = {"foreign": "int nothing() { return 0; }", "old": ""}
    if kind == "old":
        names = [line.split('"')[1] for line in _signatures()]
        bodies = [
            f"long {name}() {{ return {99 if name == 'entmtp_abi' else 0}; }}" for name in names
        ]
        sources["old"] = "\n".join(bodies)
    (tmp_path / "x.cpp").write_text(f'extern "C" {{\n{sources[kind]}\n}}')
    command = [
        find_compiler(),
        "-shared",
        "-fPIC",
        str(tmp_path / "x.cpp"),
        "-o",
        str(tmp_path / "x"),
    ]
    subprocess.run(command, check=True)
    reason, backend, error = report(copy_package(tmp_path / "copy", tmp_path / "x"), model)
    assert "does not load here or is of another version" in reason
    assert backend == "torch-cpu"
    assert "use --backend torch" in error


def _signatures() -> list[str]:
    """Lines of the binding that name a function."""
    source = Path(builder.__file__).with_name("library.py").read_text(encoding="utf-8")
    return [line for line in source.splitlines() if line.strip().startswith('"entmtp_')]


@needs_library
def test_a_library_that_loads_needs_no_reason() -> None:
    """It is loaded once."""
    assert missing_reason() is None
    assert load_library() is load_library()
    assert ISAS[-1] == "portable"


# -- options of load -------------------------------------------------------------------------------


@needs_fast
def test_auto_takes_the_core_where_it_fits(model: Path, odd: Path) -> None:
    """Torch for shapes that do not, and for a dtype of torch."""
    assert isinstance(load_target(model), NativeTarget)
    assert isinstance(load_target(model, dtype="int8"), NativeTarget)
    assert isinstance(load_target(odd), LlamaTarget)
    for dtype in ("float32", "bfloat16"):
        assert isinstance(load_target(model, dtype=dtype), LlamaTarget)
    assert isinstance(load_target(model, backend="torch"), LlamaTarget)


@needs_library
@pytest.mark.parametrize("isa", [*ISAS, "auto"])
def test_an_instruction_set_is_used(isa: str, model: Path) -> None:
    """With and without the backend's name."""
    for options in ({"backend": "native"}, {"dtype": "int8"}, {"device": "cpu", "dtype": "int8"}):
        target = load_target(model, isa=isa, **options)
        assert target.backend == f"native-{ISAS[0] if isa == 'auto' else isa}"
        assert target.precision == "int8"


@needs_library
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isa": "sse9"}, "instruction set is 'sse9'; here it must be auto or one of "),
        ({"isa": "sse9", "backend": "native"}, "instruction set is 'sse9'"),
        ({"backend": "native", "dtype": "float32"}, "int8 on a CPU, not in float32 on cpu"),
        ({"backend": "torch", "dtype": "int8"}, "int8 and instruction sets are of the native"),
        ({"backend": "torch", "isa": "portable"}, "int8 and instruction sets are of the native"),
        ({"dtype": "float32", "isa": "portable"}, "int8 and instruction sets are of the native"),
        ({"backend": "best"}, "backend is 'best'; it must be one of auto, torch, native"),
        ({"dtype": "int4"}, "dtype is 'int4'; it must be auto, int8 or one of float32"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(
    options: dict[str, Any], message: str, model: Path
) -> None:
    """Nothing is dropped silently."""
    with pytest.raises(InputError, match=message):
        load_target(model, **options)


@needs_library
@pytest.mark.parametrize("options", [{"backend": "native"}, {"dtype": "int8"}], ids=str)
def test_a_shape_that_does_not_fit_is_refused_by_name(options: dict[str, Any], odd: Path) -> None:
    """Where the core was asked for."""
    with pytest.raises(UnsupportedModelError, match=r"is \d+, but the native core .*--backend"):
        load_target(odd, **options)


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_any_number_of_threads_runs(threads: int, model: Path) -> None:
    """More than there are cores, too; it may be changed later, and is checked."""
    target = load_native(model, read_config(model), threads=threads, isa="auto")
    expected = logits_of(load_target(model, backend="native"))
    assert torch.equal(logits_of(target), expected)
    for other in (3, 1, 2):
        target.set_threads(other)
        assert torch.equal(logits_of(target), expected)
    for bad in (0, -1, MAX_THREADS + 1, 10**6):
        with pytest.raises(InputError, match=rf"threads is {bad}; the native core takes 1 to 64"):
            target.set_threads(bad)
    assert torch.equal(logits_of(target), expected)


@needs_library
def test_torch_may_have_more_threads_than_the_core_takes(model: Path) -> None:
    """On a machine with more than 64 cores auto once found no memory."""
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(70);"
        "from entmtp.loading.loader import load_target;"
        f"print(load_target(Path({str(model)!r}), backend='native').backend)"
    )
    done = python(Path(builder.__file__).parents[2], code)
    assert done.stdout == f"native-{ISAS[0]}\n", done.stderr


# -- packed weights on disk ------------------------------------------------------------------------


def logits_of(target: Target) -> torch.Tensor:
    """Of a few tokens."""
    import numpy as np

    from entmtp.target.base import Segment

    tokens = torch.arange(20)
    return target.forward([Segment(target.new_cache(20), tokens, np.arange(20))]).logits[0]


def assert_decodes_like(target: Target, other: Target) -> None:
    """Bit for bit."""
    assert torch.equal(logits_of(target), logits_of(other))


def load_packed(model: Path, isa: str = "auto") -> tuple[NativeTarget, Path]:
    """A target and the file that its weights are kept in."""
    assert LIBRARY is not None
    target = load_native(model, read_config(model), threads=1, isa=isa)
    return target, packed_file(model, LIBRARY.layout(LIBRARY.isa(isa)))


def stamp(file: Path) -> tuple[int, int]:
    """Changes when a file is written again."""
    return file.stat().st_mtime_ns, file.stat().st_ino


@needs_library
def test_packed_weights_are_kept(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second load reads them and computes the same."""
    first, file = load_packed(model)
    before = stamp(file)
    second, same = load_packed(model)
    assert (same, stamp(file)) == (file, before)
    assert_decodes_like(first, second)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert caplog.text == ""


def damages(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A packed file after some accidents."""
    header = int.from_bytes(data[:8], "little")
    middle = bytearray(data)
    middle[8 + header + 1000] ^= 4
    yield "a flipped bit", bytes(middle)
    last = bytearray(data)
    last[-1] ^= 128
    yield "the last byte", bytes(last)
    for share in (0.0, 0.001, 0.5, 0.999):
        yield f"cut to {share}", data[: int(len(data) * share)]
    yield "longer", data + b"\0" * 10
    checksums = bytearray(data)
    checksums[data.index(b"crc32") + 10] ^= 1
    yield "the checksums", bytes(checksums)
    yield "no file of this kind", b"hello" * 100


@needs_library
def test_damaged_weights_are_noticed_and_repaired(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happened to the file: a line in the log, and it is as before."""
    first, file = load_packed(model)
    data = file.read_bytes()
    for what, damaged in damages(data):
        caplog.clear()
        file.write_bytes(damaged)
        with caplog.at_level(logging.WARNING, "entmtp"):
            again, _ = load_packed(model)
        assert "is damaged and is made again" in caplog.text, what
        assert file.read_bytes() == data, what
        assert_decodes_like(first, again)


@needs_library
@pytest.mark.slow
def test_any_byte_of_the_header_may_be_damaged(model: Path) -> None:
    """It is never an error, and never another model."""
    first, file = load_packed(model)
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    for place in [*range(8), *range(8, 8 + header, 7)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 7
        file.write_bytes(bytes(damaged))
        again, _ = load_packed(model)
        assert_decodes_like(first, again)


@needs_library
@pytest.mark.skipif(len(ISAS) < 2, reason=f"this CPU runs only {ISAS}")
def test_each_layout_has_its_own_file(model: Path) -> None:
    """The bytes of one instruction set mean nothing to another."""
    files = {load_packed(model, isa)[1] for isa in ISAS}
    assert len(files) == len(ISAS)
    assert all(file.is_file() for file in files)


@needs_library
@pytest.mark.parametrize("change", ["weights", "config", "place"])
def test_a_model_that_changed_is_packed_again(change: str, tmp_path: Path) -> None:
    """Other weights, another config.json or another folder: another file."""
    folder = make_model_folder(tmp_path / "a", **FITS)
    first, before = load_packed(folder)
    if change == "weights":
        make_model_folder(folder, seed=1, **FITS)
    elif change == "config":
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(data | {"rms_norm_eps": 0.5}))
    else:
        folder = folder.rename(tmp_path / "b")
    second, after = load_packed(folder)
    assert before != after
    assert torch.equal(logits_of(first), logits_of(second)) == (change == "place")


@needs_library
def test_a_gguf_file_is_packed_too(tmp_path: Path) -> None:
    """Or its shape is refused by name, as this one's is."""
    write_gguf(tmp_path / "m.gguf", make_tensors())
    with pytest.raises(UnsupportedModelError, match="native core needs a multiple of 32"):
        load_target(tmp_path / "m.gguf", backend="native")
    assert packed_file(tmp_path / "m.gguf", 1) != packed_file(tmp_path / "m.gguf", 2)


@needs_library
def test_a_folder_that_cannot_be_written_is_said_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model loads all the same, and is packed again the next time."""
    (tmp_path / "file").write_text("not a folder")
    expected, _ = load_packed(model)
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "entmtp"):
        target, file = load_packed(model)
    assert caplog.text.count("packed weights cannot be kept under") == 1
    assert not file.is_file()
    assert_decodes_like(target, expected)


def test_every_refusal_has_one_base_class(odd: Path) -> None:
    """With or without the library."""
    for path, options in ((odd, {"backend": "native"}), (odd, {"isa": "sse9"}), (odd / "x", {})):
        with pytest.raises(EntmtpError):
            load_target(path, **options)
    assert issubclass(AssetError, EntmtpError)
