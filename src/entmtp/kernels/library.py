"""The compiled library through ctypes: structures, signatures, and why it may be missing."""

import ctypes
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.errors import CheckpointError, InputError

__all__ = [
    "ISAS",
    "CConfig",
    "CDraw",
    "CFront",
    "CGrowth",
    "CHead",
    "CHeadJob",
    "CHeads",
    "CJob",
    "CLayer",
    "CLevel",
    "CMatrix",
    "CRanking",
    "CSegment",
    "CText",
    "CTree",
    "CVocabulary",
    "CWeights",
    "Candidates",
    "Library",
    "address",
    "library_digest",
    "load_library",
    "missing_reason",
]

ISAS = ("avx512", "avx2", "portable")
"""Instruction sets, the fastest first."""

ABI = 5
_NAMES = {"Linux": "libentmtp.so", "Darwin": "libentmtp.dylib", "Windows": "entmtp.dll"}
_FOLDER = Path(__file__).parent
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int32
_Word = ctypes.c_uint64

Candidates = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.float32]]
"""Ids, their words of noise, and their scores."""


class CConfig(ctypes.Structure):
    """``Config`` of core.h."""

    _fields_ = [
        *(
            (name, _Int)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "inter",
                "vocab",
                "max_positions",
                "qkv_bias",
                "o_bias",
                "mlp_bias",
                "qk_norm",
                "mix",
                "odd",
            )
        ),
        ("eps", ctypes.c_float),
    ]


class CLayer(ctypes.Structure):
    """``EntmtpLayer`` of engine.h."""

    _fields_ = [
        (name, _Pointer)
        for name in (
            "qkv",
            "o",
            "gate_up",
            "down",
            "qkv_bias",
            "o_bias",
            "gate_up_bias",
            "down_bias",
            "q_norm",
            "k_norm",
        )
    ]


class CWeights(ctypes.Structure):
    """``EntmtpWeights`` of engine.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(CLayer)),
        *((name, _Pointer) for name in ("head", "embedding", "dense", "final_norm", "cos", "sin")),
    ]


class CSegment(ctypes.Structure):
    """``Segment`` of core.h."""

    _fields_ = [
        ("cache", _Pointer),
        ("first_row", _Int),
        ("num_rows", _Int),
        ("mask", _Pointer),
        ("held_positions", _Pointer),
        ("held", _Int),
    ]


class CRanking(ctypes.Structure):
    """``Ranking`` of core.h."""

    _fields_ = [
        ("scores", _Pointer),
        ("count", _Int),
        ("best", _Pointer),
        ("values", _Pointer),
        ("noise", _Pointer),
        ("scale", _Pointer),
        ("log_sums", _Pointer),
    ]


class CJob(ctypes.Structure):
    """``Job`` of core.h."""

    _fields_ = [
        ("tokens", _Pointer),
        ("positions", _Pointer),
        ("segments", ctypes.POINTER(CSegment)),
        ("num_segments", _Int),
        ("num_rows", _Int),
        ("hidden", _Pointer),
        ("logit_rows", _Pointer),
        ("num_logit_rows", _Int),
        ("logits", _Pointer),
        ("stats", _Pointer),
        ("inputs", _Pointer),
        ("ranking", CRanking),
    ]


class CVocabulary(ctypes.Structure):
    """``Vocabulary`` of core.h."""

    _fields_ = [
        ("embedding", _Pointer),
        ("embed_scale", ctypes.c_float),
        ("tokens", _Int),
        ("columns", _Int),
        ("hot_ids", _Pointer),
    ]


class CFront(ctypes.Structure):
    """``EntmtpFront`` of engine.h."""

    _fields_ = [
        ("join", _Pointer),
        ("hidden_first", _Int),
        ("output_bias", _Pointer),
        ("vocabulary", CVocabulary),
    ]


class CMatrix(ctypes.Structure):
    """``EntmtpMatrix`` of engine.h."""

    _fields_ = [("packed", _Pointer), ("bias", _Pointer), ("channels", _Int), ("k", _Int)]


class CHead(ctypes.Structure):
    """``EntmtpHead`` of engine.h."""

    _fields_ = [("first", _Int), ("output", _Int), ("num_blocks", _Int), ("blocks", _Pointer)]


class CHeads(ctypes.Structure):
    """``EntmtpHeads`` of engine.h."""

    _fields_ = [
        ("hidden", _Int),
        ("num_matrices", _Int),
        ("num_heads", _Int),
        ("matrices", ctypes.POINTER(CMatrix)),
        ("heads", ctypes.POINTER(CHead)),
        ("vocabulary", CVocabulary),
    ]


class CHeadJob(ctypes.Structure):
    """``HeadJob`` of core.h."""

    _fields_ = [
        ("head", _Int),
        ("num_rows", _Int),
        ("num_base", _Int),
        ("base", _Pointer),
        ("base_of", _Pointer),
        ("tokens", _Pointer),
        ("ranking", CRanking),
    ]


class CLevel(ctypes.Structure):
    """``EntmtpLevel`` of engine.h."""

    _fields_ = [
        ("rows", _Int),
        ("children", _Int),
        ("width", _Int),
        *((name, _Pointer) for name in ("paths", "nodes", "parents", "ranks", "above", "mask")),
    ]


class CTree(ctypes.Structure):
    """``EntmtpTree`` of engine.h."""

    _fields_ = [
        ("num_nodes", _Int),
        ("num_levels", _Int),
        ("levels", ctypes.POINTER(CLevel)),
        ("tokens", _Pointer),
        ("noise", _Pointer),
        ("scale", ctypes.c_float),
    ]


class CGrowth(ctypes.Structure):
    """``EntmtpGrowth`` of engine.h."""

    _fields_ = [
        ("num_nodes", _Int),
        ("num_levels", _Int),
        ("levels", ctypes.POINTER(CLevel)),
        *((name, _Pointer) for name in ("table", "rows_ms", "draft_ms", "draft_row_ms", "gains")),
        ("rate", ctypes.c_double),
        ("tokens", _Pointer),
        ("noise", _Pointer),
        ("scale", ctypes.c_float),
        ("num_copied", _Int),
        *((name, _Pointer) for name in ("copied", "hits", "mixes", "codes", "kept")),
        ("num_kept", _Int),
        ("attach", _Int),
    ]


class CDraw(ctypes.Structure):
    """``Draw`` of core.h."""

    _fields_ = [
        ("seed", _Word),
        ("position", _Word),
        ("scores", _Pointer),
        ("count", _Int),
        ("temperature", ctypes.c_float),
        *((name, _Pointer) for name in ("known", "ids", "words", "chosen")),
    ]


class CText(ctypes.Structure):
    """``EntmtpText`` of engine.h."""

    _fields_ = [
        ("cache", _Pointer),
        ("num_rows", _Int),
        ("inputs", _Pointer),
        ("tokens", _Pointer),
    ]


@dataclass(frozen=True)
class Library:
    """The library, and what this CPU can run of it."""

    lib: Any
    isas: tuple[str, ...]

    def isa(self, name: str) -> str:
        """The instruction set to use.

        Args:
            name: ``auto`` for the fastest, or one of :data:`ISAS`.

        Raises:
            InputError: unknown, or this CPU lacks it.
        """
        if name == "auto":
            return self.isas[0]
        if name not in self.isas:
            raise InputError(
                f"instruction set is {name!r}; here it must be auto or one of "
                f"{', '.join(self.isas)}"
            )
        return name

    def layout(self, isa: str) -> int:
        """Number of the weights' byte order under an instruction set."""
        return int(self.lib.entmtp_isa_layout(isa.encode()))

    def pack(self, rows: npt.NDArray[np.float32], isa: str) -> npt.NDArray[np.uint8]:
        """Quantise and pack a matrix ``(channels, k)``; k is a multiple of 16.

        Raises:
            CheckpointError: the matrix holds NaN or infinity.
        """
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        channels, k = rows.shape
        out = np.zeros(int(self.lib.entmtp_packed_bytes(channels, k)), dtype=np.uint8)
        code = self.lib.entmtp_pack(isa.encode(), address(rows), channels, k, address(out))
        if code == 2:
            raise CheckpointError("the weights hold NaN or infinity: fetch the model again")
        assert code == 0, "the caller sees to the shape"  # noqa: S101
        return out

    def dot_rate(self, isa: str, threads: int, windows: int = 9) -> float:
        """Multiplications a second that the innermost product reaches, over all threads.

        Weights and rows lie in the nearest memory, so this is what a forward that waits for nothing
        would do at the machine's usual speed: each thread counts at its median over ``windows``
        windows of about a millisecond.
        """
        return float(self.lib.entmtp_dot_rate(isa.encode(), threads, windows))

    def noise_words(self, seed: int, position: int, count: int) -> npt.NDArray[np.uint32]:
        """The words that the noise of token ids ``0 .. count - 1`` is made of."""
        words = np.empty(count, dtype=np.uint32)
        isa = self.isas[0].encode()
        code = self.lib.entmtp_noise_words(isa, seed, position, count, address(words))
        assert code == 0, "the instruction set is one of ours"  # noqa: S101
        return words

    def noise_candidates(
        self,
        seed: int,
        position: int,
        scores: npt.NDArray[np.float32],
        temperature: float = 0.0,
        known: npt.NDArray[np.uint32] | None = None,
    ) -> Candidates | None:
        """The ids that can be the arg-max of scores plus noise, rising; their words and scores.

        The arg-max is always among them, with all ids that equal it. They are few, unless most
        scores are NaN or equal and infinite.

        Args:
            seed: of the noise.
            position: of the noise.
            scores: ``(V,)``.
            temperature: above 0, ``scores`` are raw logits x, and (x - max) / temperature the
                scores.
            known: :meth:`noise_words` of the position, where they are there already.

        Returns:
            ``None`` where logits are not finite.
        """
        ids, words = np.empty(scores.size, dtype=np.int32), np.empty(scores.size, dtype=np.uint32)
        chosen = np.empty(scores.size, dtype=np.float32)
        places = (address(known), address(ids), address(words), address(chosen))
        draw = CDraw(seed, position, address(scores), scores.size, temperature, *places)
        found = self.lib.entmtp_noise_candidates(self.isas[0].encode(), ctypes.byref(draw))
        if found == -2:
            return None
        assert found >= 0, "the instruction set is one of ours"  # noqa: S101
        return ids[:found], words[:found], chosen[:found]


def address(array: npt.NDArray[Any] | None) -> int | None:
    """Where the data of a contiguous array begins; the array must outlive the use."""
    if array is None:
        return None
    assert array.flags.c_contiguous  # noqa: S101 - our own arrays are
    if array.size and array.flags.writeable:  # a third of the time of the other way
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return int(array.ctypes.data)


@lru_cache(maxsize=1)
def load_library() -> Library | None:
    """The library; ``None`` where it is missing, see :func:`missing_reason`."""
    try:
        lib = ctypes.CDLL(str(_file()))
        _declare(lib)
        if lib.entmtp_abi() != ABI:
            return None
    except (OSError, AttributeError):
        return None
    isas = tuple(name for name in ISAS if lib.entmtp_isa_supported(name.encode()))
    return Library(lib, isas)


@lru_cache(maxsize=1)
def library_digest() -> str | None:
    """First 16 hex digits of the SHA-256 of the library's file; ``None`` where it is missing."""
    if load_library() is None:
        return None
    return hashlib.sha256(_file().read_bytes()).hexdigest()[:16]


def missing_reason() -> str | None:
    """Why :func:`load_library` gives nothing; ``None`` where it gives something."""
    if load_library() is not None:
        return None
    if not _file().is_file():
        return "the native library was not built (no C++ compiler when entmtp was installed)"
    return f"the native library {_file().name} does not load here or is of another version"


def _file() -> Path:
    return _FOLDER / _NAMES.get(platform.system(), _NAMES["Linux"])


def _declare(lib: Any) -> None:
    """Argument and result types of the C functions."""
    signatures: dict[str, tuple[Any, Sequence[Any]]] = {
        "entmtp_abi": (_Int, ()),
        "entmtp_isa_supported": (_Int, (ctypes.c_char_p,)),
        "entmtp_isa_layout": (_Int, (ctypes.c_char_p,)),
        "entmtp_pack": (_Int, (ctypes.c_char_p, _Pointer, _Int, _Int, _Pointer)),
        "entmtp_packed_bytes": (ctypes.c_size_t, (_Int, _Int)),
        "entmtp_model_new": (
            _Pointer,
            (ctypes.POINTER(CConfig), ctypes.POINTER(CWeights), _Int, ctypes.c_char_p),
        ),
        "entmtp_block_new": (
            _Pointer,
            (
                _Pointer,
                ctypes.POINTER(CConfig),
                ctypes.POINTER(CWeights),
                ctypes.POINTER(CFront),
            ),
        ),
        "entmtp_heads_new": (_Pointer, (_Pointer, ctypes.POINTER(CHeads))),
        "entmtp_heads_run": (_Int, (_Pointer, ctypes.POINTER(CHeadJob))),
        "entmtp_heads_fill": (_Int, (_Pointer, _Pointer, ctypes.POINTER(CTree), _Int)),
        "entmtp_block_fill": (
            _Int,
            (_Pointer, ctypes.POINTER(CText), ctypes.POINTER(CTree), _Int),
        ),
        "entmtp_heads_grow": (_Int, (_Pointer, _Pointer, ctypes.POINTER(CGrowth), _Int)),
        "entmtp_block_grow": (
            _Int,
            (_Pointer, ctypes.POINTER(CText), ctypes.POINTER(CGrowth), _Int),
        ),
        "entmtp_model_free": (None, (_Pointer,)),
        "entmtp_model_threads": (_Int, (_Pointer, _Int)),
        "entmtp_model_bytes": (ctypes.c_size_t, (_Pointer,)),
        "entmtp_cache_new": (_Pointer, (_Pointer, _Int)),
        "entmtp_cache_free": (None, (_Pointer,)),
        "entmtp_cache_length": (_Int, (_Pointer,)),
        "entmtp_cache_capacity": (_Int, (_Pointer,)),
        "entmtp_cache_grow": (_Pointer, (_Pointer, _Pointer, _Int)),
        "entmtp_cache_truncate": (_Int, (_Pointer, _Int)),
        "entmtp_cache_commit": (_Int, (_Pointer, _Pointer, _Pointer, _Int)),
        "entmtp_linear_new": (_Pointer, (_Pointer, _Pointer, _Int, _Int)),
        "entmtp_linear_free": (None, (_Pointer,)),
        "entmtp_linear_run": (_Int, (_Pointer, _Pointer, _Pointer, _Int, _Pointer)),
        "entmtp_dot_rate": (ctypes.c_double, (ctypes.c_char_p, _Int, _Int)),
        "entmtp_noise_words": (_Int, (ctypes.c_char_p, _Word, _Word, _Int, _Pointer)),
        "entmtp_noise_candidates": (_Int, (ctypes.c_char_p, ctypes.POINTER(CDraw))),
        "entmtp_forward": (_Int, (_Pointer, ctypes.POINTER(CJob))),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, list(arguments)
