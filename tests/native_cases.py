"""Tiny models that the native core accepts, with random weights, and what tests ask of them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from entmtp.decoder.rope import RopeScaling
from entmtp.kernels.library import CJob, CSegment, address, load_library, missing_reason
from entmtp.target.base import KVCache, Segment, Target, TargetConfig, TargetOutput
from entmtp.target.llama import LlamaTarget
from entmtp.target.native import NativeKVCache, NativeTarget
from entmtp.target.native_weights import Array, pack_model
from entmtp.target.weights import tensor_shapes
from entmtp.topology import Topology
from fakes import tiny_config

__all__ = [
    "CASES",
    "ISAS",
    "LONG",
    "STATS",
    "Alone",
    "Job",
    "assert_instruction_sets_agree",
    "chain",
    "decode_alone",
    "make_case",
    "make_native",
    "make_reference",
    "needs_library",
    "prefilled",
    "tokens_of",
    "tree_segment",
]

LIBRARY = load_library()
ISAS = () if LIBRARY is None else LIBRARY.isas
needs_library = pytest.mark.skipif(LIBRARY is None, reason=str(missing_reason()))

YARN = RopeScaling(kind="yarn", factor=4.0, original_context=64, attention_factor=1.1386)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_context=64)
CASES: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 160, "rope_scaling": LLAMA3},
    "mistral": {
        "family": "mistral",
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 300,
        "tie_embeddings": False,
    },
    "qwen2": {
        "family": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 5,
        "num_kv_heads": 1,
        "vocab_size": 1090,  # a second chunk of 1024, whose last panel is not full
        "qkv_bias": True,
        "rope_scaling": RopeScaling(kind="linear", factor=4.0),
    },
    "qwen3": {
        "family": "qwen3",
        "hidden_size": 160,
        "intermediate_size": 512,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 96,
        "vocab_size": 2048,
        "tie_embeddings": False,
        "qk_norm": True,
    },
    "biased": {
        "hidden_size": 352,
        "intermediate_size": 224,
        "head_dim": 64,
        "vocab_size": 31,  # less than one panel
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_scaling": YARN,
    },
    "divisors": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_layers": 3,
        "rope_scaling": RopeScaling(kind="divisors", divisors=(1.0,) * 8 + (8.0,) * 8),
    },
    "short": {"hidden_size": 64, "intermediate_size": 96, "context_window": 40, "num_layers": 1},
}


LONG = tuple(name for name in CASES if name != "short")
"""Cases with room for 700 positions."""


@lru_cache(maxsize=32)
def make_case(name: str, seed: int = 1) -> tuple[TargetConfig, dict[str, Tensor]]:
    """Sizes and random float32 weights; norms and biases are away from their usual values."""
    config = tiny_config(**{"head_dim": 32, "context_window": 700, **CASES[name]})
    generator = torch.Generator().manual_seed(seed)

    def draw(key: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 1 + 0.1 * noise if "norm" in key else 0.3 * noise
        return noise * (0.5 if "embed" in key or "lm_head" in key else 0.15)

    return config, {key: draw(key, shape) for key, shape in tensor_shapes(config).items()}


@lru_cache(maxsize=32)
def packed(name: str, seed: int, isa: str) -> dict[str, Array]:
    """Arrays of the core for an instruction set."""
    assert LIBRARY is not None
    config, tensors = make_case(name, seed)
    return pack_model(config, tensors.items(), LIBRARY, isa)


@dataclass(frozen=True)
class TensorMatrices:
    """Embedding and output head from tensors at hand."""

    config: TargetConfig
    tensors: dict[str, Tensor]

    def embedding(self) -> Tensor:
        return self.tensors["model.embed_tokens.weight"]

    def output_rows(self, ids: Tensor) -> Tensor:
        name = "model.embed_tokens" if self.config.tie_embeddings else "lm_head"
        return self.tensors[f"{name}.weight"][ids]


@lru_cache(maxsize=32)
def make_native(name: str, threads: int = 1, isa: str = "auto", seed: int = 1) -> NativeTarget:
    """A case in the core."""
    assert LIBRARY is not None
    config, tensors = make_case(name, seed)
    isa = LIBRARY.isa(isa)
    matrices = TensorMatrices(config, tensors)
    return NativeTarget(
        config, packed(name, seed, isa), matrices, LIBRARY, threads=threads, isa=isa
    )


@lru_cache(maxsize=32)
def make_reference(name: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> LlamaTarget:
    """The same model in torch."""
    config, tensors = make_case(name, seed)
    return LlamaTarget(config, tensors.items(), dtype)


def tokens_of(target: Target, size: int, seed: int = 0) -> Tensor:
    """Seeded token ids of a model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.config.vocab_size, (size,), generator=generator)


def chain(cache: KVCache, tokens: Tensor) -> Segment:
    """Tokens one after the other."""
    return Segment(cache, tokens, np.arange(len(tokens)))


def tree_segment(cache: KVCache, tree: Topology, tokens: Tensor) -> Segment:
    """A draft tree."""
    return Segment(cache, tokens, tree.depths, tree.ancestor_mask)


def prefilled(target: NativeTarget, tokens: Tensor) -> NativeKVCache:
    """A cache that holds these tokens, read in one chunk."""
    cache = target.new_cache(len(tokens))
    if len(tokens):
        target.forward([chain(cache, tokens)])
        cache.commit(range(len(tokens)))
    return cache


@dataclass(frozen=True)
class Alone:
    """Rows of tokens that were decoded one by one, alone, on one thread."""

    hidden: Tensor
    logits: Tensor


def decode_alone(target: NativeTarget, cache: NativeKVCache, tokens: Tensor) -> Alone:
    """One forward a token, each committed."""
    outputs: list[TargetOutput] = []
    for token in tokens:
        outputs.append(target.forward([chain(cache, token[None])]))
        cache.commit([0])
    return Alone(
        torch.cat([o.hidden[0] for o in outputs]), torch.cat([o.logits[0] for o in outputs])
    )


STATS = np.dtype([("argmax", "<i4"), ("p_max", "<f4"), ("log_sum_exp", "<f4"), ("entropy", "<f4")])
"""``RowStats`` of core.h."""


@dataclass
class Job:
    """One segment by hand through the C interface, legal or not.

    Attributes:
        tokens: of the rows.
        depths: of the rows; a chain by default.
        mask: of a tree.
        logit_rows: all rows by default.
        num_rows: what the segment claims.
    """

    tokens: Sequence[int]
    depths: Sequence[int] | None = None
    mask: npt.NDArray[np.bool_] | None = None
    logit_rows: Sequence[int] | None = None
    num_rows: int | None = None

    def run(self, target: NativeTarget, cache: NativeKVCache, *, room: bool = True) -> int:
        """The code of the forward; results lie in ``hidden``, ``logits`` and ``stats``."""
        size = len(self.tokens)
        tokens = np.array(self.tokens, dtype=np.int32)
        depths = range(size) if self.depths is None else self.depths
        positions = np.array(depths, dtype=np.int32) + cache.length
        mask = None if self.mask is None else np.ascontiguousarray(self.mask, dtype=np.uint8)
        wanted = range(size) if self.logit_rows is None else self.logit_rows
        rows = np.array(wanted, dtype=np.int32)
        self.hidden = np.zeros((size, target.config.hidden_size), dtype=np.float32)
        self.logits = np.zeros((len(rows), target.config.vocab_size), dtype=np.float32)
        self.stats = np.zeros(len(rows), dtype=STATS)
        claimed = size if self.num_rows is None else self.num_rows
        pointer = cache.begin(size) if room else cache._pointer
        segments = (CSegment * 1)(CSegment(pointer, 0, claimed, address(mask)))
        arrays = (self.hidden, rows, self.logits, self.stats)
        hidden, at, logits, stats = (address(a) for a in arrays)
        job = CJob(
            address(tokens), address(positions), segments, 1, size, hidden, at, len(rows), logits,
            stats,
        )  # fmt: skip
        lib = target._library.lib
        return int(lib.entmtp_forward(target._model.pointer, ctypes.byref(job)))


def assert_instruction_sets_agree(name: str, isas: Sequence[str]) -> None:
    """A prompt of two spans and a tree give the same bits under each, on one thread and on two."""
    tree = Topology.from_paths([(a,) * d for a in range(4) for d in range(1, 6)])
    results = []
    for number, isa in enumerate(isas):
        target = make_native(name, 1 + number % 2, isa)
        prompt, drafted = tokens_of(target, 150), tokens_of(target, tree.num_rows, 1)
        cache = target.new_cache(8)
        outputs = [target.forward([chain(cache, prompt)])]
        cache.commit(range(len(prompt)))
        outputs.append(target.forward([tree_segment(cache, tree, drafted)]))
        results.append([t for o in outputs for t in (o.hidden[0], o.logits[0])])
    for isa, rows in zip(isas, results, strict=True):
        for row, expected in zip(rows, results[0], strict=True):
            assert torch.equal(row, expected), (name, isa)
