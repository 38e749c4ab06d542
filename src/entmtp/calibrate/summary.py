"""The short form of a trace that a bank carries, so that it can be fitted again without a model.

Kept are the ranks, the codes of the envelope, the copies and the signals, these in reduced
precision; tokens are left out. A bank is always fitted to the short form, so that fitting it again
gives the same bank.
"""

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.trace import Trace, TraceFacts
from entmtp.errors import BankError

__all__ = ["pack_trace", "shorten", "unpack_trace"]

_TYPES = {
    "offsets": "<i4",
    "prompt_lengths": "<i4",
    "ranks": "|u1",
    "entropy": "<f2",
    "p0": "<f2",
    "chain": "|u1",
    "codes": "|u1",
    "copy_match": "|u1",
    "copy_hits": "|u1",
    "copy_node": "|u1",
}
_NO_CHAIN = 255  # of a drafter that has none; probabilities are in steps of 1/254


def pack_trace(trace: Trace) -> dict[str, Any]:
    """A trace as a JSON object."""
    values = {name: getattr(trace, name) for name in _TYPES}
    chain = trace.chain.astype(np.float32)
    steps = np.rint(np.nan_to_num(chain) * (_NO_CHAIN - 1))
    values["chain"] = np.where(np.isnan(chain), _NO_CHAIN, steps)
    return {
        "facts": trace.facts.to_json(),
        "ids": list(trace.ids),
        "tasks": list(trace.tasks),
        "depth": trace.max_depth,
        **{name: _pack(values[name].astype(kind)) for name, kind in _TYPES.items()},
    }


def unpack_trace(document: Mapping[str, Any]) -> Trace:
    """The trace of a JSON object; its tokens are zeros.

    Raises:
        BankError: not such an object.
    """
    try:
        facts = TraceFacts.from_json(document["facts"])
        arrays = {name: _unpack(document[name], kind) for name, kind in _TYPES.items()}
        depth = int(document["depth"])
        num_tokens = len(arrays["entropy"])
        chain = arrays["chain"].reshape(num_tokens, depth)
        probabilities = np.where(chain == _NO_CHAIN, np.nan, chain / np.float32(_NO_CHAIN - 1))
        return Trace(
            facts=facts,
            ids=tuple(document["ids"]),
            tasks=tuple(document["tasks"]),
            tokens=np.zeros(num_tokens, dtype=np.int32),
            offsets=arrays["offsets"].astype(np.int64),
            prompt_lengths=arrays["prompt_lengths"].astype(np.int32),
            ranks=arrays["ranks"].reshape(num_tokens, depth),
            entropy=arrays["entropy"].astype(np.float32),
            p0=arrays["p0"].astype(np.float32),
            chain=probabilities.astype(np.float16),
            codes=arrays["codes"].reshape(num_tokens, len(facts.envelope)),
            copy_match=arrays["copy_match"],
            copy_hits=arrays["copy_hits"],
            copy_node=arrays["copy_node"],
        )
    except (KeyError, TypeError, ValueError, zlib.error, binascii.Error) as error:
        raise BankError(f"trace: not the short form of a trace ({error!r})") from error


def shorten(trace: Trace) -> Trace:
    """What is left of a trace in its short form."""
    return unpack_trace(pack_trace(trace))


def _pack(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()


def _unpack(text: str, kind: str) -> npt.NDArray[Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=kind)
