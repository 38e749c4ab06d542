"""Small stand-ins for the parts of the system: no network, no weights."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from entmtp.drafters.base import DraftRequest, DraftTree, GrownTree
from entmtp.target.base import TargetConfig
from entmtp.target.llama import LlamaTarget
from entmtp.tokenizer import Message

__all__ = [
    "ByteTokenizer",
    "FakeClock",
    "GrowingLookup",
    "HopelessDrafter",
    "PerfectDrafter",
    "ScriptedDrafter",
    "tiny_config",
    "tiny_target",
]


class ByteTokenizer:
    """One token a byte; ids from ``vocab_size`` - 1 down to 256 are special."""

    def __init__(self, vocab_size: int = 257, eos_ids: Sequence[int] = (256,)) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}\n" for m in messages))


def tiny_config(**changes: object) -> TargetConfig:
    """Sizes of a two-layer target with grouped key-value heads."""
    values: dict[str, object] = {
        "family": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "context_window": 256,
        "tie_embeddings": True,
        **changes,
    }
    return TargetConfig(**values)  # type: ignore[arg-type]


def tiny_target(
    seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0, **changes: object
) -> LlamaTarget:
    """A seeded target with random weights; ``scale`` sharpens its distributions."""
    config = tiny_config(**changes)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, std: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    h, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": random(config.vocab_size, h, std=1.0),
        "model.norm.weight": torch.ones(h) * scale,
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = random(config.vocab_size, h, std=1.0)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(h),
            prefix + "post_attention_layernorm.weight": torch.ones(h),
            prefix + "self_attn.q_proj.weight": random(q, h),
            prefix + "self_attn.k_proj.weight": random(kv, h),
            prefix + "self_attn.v_proj.weight": random(kv, h),
            prefix + "self_attn.o_proj.weight": random(h, q),
            prefix + "mlp.gate_proj.weight": random(inner, h),
            prefix + "mlp.up_proj.weight": random(inner, h),
            prefix + "mlp.down_proj.weight": random(h, inner),
        }
    return LlamaTarget(config, tensors.items(), dtype=dtype)


class ScriptedDrafter:
    """Fills every tree by a function of (text so far with root and path, rank)."""

    name = "scripted"
    digest = ""

    def __init__(
        self, token: Callable[[Sequence[int], int], int], max_depth: int | None = None
    ) -> None:
        self._token = token
        self.max_depth = max_depth
        self.max_width: int | None = None

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> list[int]:
        return [*prompt, root]

    def commit(self, state: list[int], hidden: Tensor, tokens: Sequence[int]) -> None:
        assert len(hidden) == len(tokens)
        state.extend(tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._fill(request) for request in requests]

    def _fill(self, request: DraftRequest) -> DraftTree:
        assert request.state[-1] == request.root
        filled: dict[tuple[int, ...], int] = {}
        for path in request.plan.paths:
            above = [filled[path[:depth]] for depth in range(1, len(path))]
            filled[path] = self._token([*request.state, *above], path[-1])
        tokens = torch.tensor([request.root, *filled.values()], dtype=torch.int64)
        return DraftTree(request.plan, tokens)


class PerfectDrafter(ScriptedDrafter):
    """Rank 0 is always the token that plain decoding emits; other ranks are wrong."""

    name = "perfect"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int = 257) -> None:
        def token(above: Sequence[int], rank: int) -> int:
            for text in texts:
                if list(text[: len(above)]) == list(above) and len(text) > len(above):
                    return (text[len(above)] + rank) % vocab_size
            return rank

        super().__init__(token)


class GrowingLookup(PerfectDrafter):
    """Says that it can grow trees; no test asks it to."""

    def grow(self, requests: object) -> list[GrownTree]:
        raise NotImplementedError


class HopelessDrafter(ScriptedDrafter):
    """Never proposes the token that plain decoding emits."""

    name = "hopeless"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int = 257) -> None:
        def token(above: Sequence[int], rank: int) -> int:
            for text in texts:
                if list(text[: len(above)]) == list(above) and len(text) > len(above):
                    return (text[len(above)] + 1 + rank) % vocab_size
            return rank

        super().__init__(token)


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
