"""What the exactness tests share: random targets, topologies, schedulers and drafters."""

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.heads import Heads, HeadsConfig, build_heads
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult
from entmtp.loading.drafters import make_drafter as attach_heads
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal
from entmtp.target.base import KVCache, Segment, Target, TargetOutput
from entmtp.target.llama import LlamaTarget
from entmtp.topology import Topology
from fakes import ByteTokenizer, ScriptedDrafter, tiny_config

NONE = FixedScheduler.plain()


def random_topology(rng: random.Random, max_nodes: int = 64, max_depth: int = 5) -> Topology:
    """Any prefix-closed tree, for tests that need no shrinking."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(0, max_nodes)):
        path = (*rng.choice(paths), rng.randint(0, 6))
        if len(path) <= max_depth and path not in paths:
            paths.append(path)
    return Topology.from_paths(paths[1:])


class RandomScheduler:
    """A different tree at every step, drawn from a list, or from all trees where none is given."""

    policy = "random"

    def __init__(self, seed: int, trees: Sequence[Topology] = ()) -> None:
        self._seed = seed
        self._trees = trees

    def start(self) -> random.Random:
        return random.Random(self._seed)

    def choose(self, state: random.Random, signal: Signal) -> SchedulerDecision:
        if not self._trees:
            return SchedulerDecision("any", random_topology(state))
        index = state.randrange(len(self._trees))
        return SchedulerDecision(f"tree{index}", self._trees[index], index)


class HalfRightDrafter(ScriptedDrafter):
    """Every node is the true continuation of its path with probability 1/2, else anything."""

    name = "half-right"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, seed: int = 0) -> None:
        def token(above: Sequence[int], rank: int) -> int:
            rng = random.Random(hash((seed, len(above), rank)))
            for text in texts:
                if len(text) > len(above) and list(text[: len(above)]) == list(above):
                    return text[len(above)] if rng.random() < 0.5 else rng.randrange(vocab_size)
            return rng.randrange(vocab_size)

        super().__init__(token)


class SpyTarget:
    """A target that keeps the caches it gave out, in order."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.config, self.device, self.dtype = target.config, target.device, target.dtype
        self.has_own_threads = target.has_own_threads
        self.backend, self.embedding = target.backend, target.embedding
        self.precision = target.precision
        self.weights_digest = target.weights_digest
        self.output_rows, self.project_output = target.output_rows, target.project_output
        self.caches: list[KVCache] = []

    def new_cache(self, capacity: int) -> KVCache:
        self.caches.append(self._target.new_cache(capacity))
        return self.caches[-1]

    def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> TargetOutput:
        return self._target.forward(segments, needs_logits=needs_logits)


@lru_cache(maxsize=64)
def random_target(
    seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> LlamaTarget:
    """A tiny target whose weights and options follow from the seed.

    The identity is tested in float64: a tiny random model has logits close together, and in
    float32 a matmul over N rows rounds differently from one over a single row, so that a near-tie
    may flip.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (4, 1), (6, 3), (2, 1)])
    config = tiny_config(
        vocab_size=rng.choice([12, 40, 257]),
        num_layers=rng.choice([1, 2, 3]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=rng.choice([4, 8]),
        tie_embeddings=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.3,
        context_window=48,
    )
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = heads * config.head_dim, kv_heads * config.head_dim

    def draw(*shape: int, std: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {
        "model.embed_tokens.weight": draw(config.vocab_size, h, std=1.0),
        "model.norm.weight": (1 + draw(h)) * rng.choice([0.15, 0.4, 1.0]),  # flat to peaked
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = draw(config.vocab_size, h, std=0.7)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = draw(*shape)
            if config.qkv_bias and name != "o":
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = draw(shape[0])
            if config.qk_norm and name in "qk":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = 1 + draw(config.head_dim)
        for name, shape in {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}.items():
            tensors[f"{prefix}mlp.{name}_proj.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + draw(h)
    return LlamaTarget(config, tensors.items(), dtype, device)


def random_heads(kind: str, target: Target, seed: int) -> Heads:
    """Modules with random weights over a random half of the vocabulary, in random order.

    The prefix layer and the recurrent block have the sizes of the target's blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab_size, size = target.config.vocab_size, target.config.hidden_size
    hot_ids = torch.randperm(vocab_size, generator=generator)[: max(8, vocab_size // 2)]
    names = BlockConfig.__dataclass_fields__
    block = BlockConfig(**{name: getattr(target.config, name) for name in names})
    config = HeadsConfig(
        kind,
        size,
        vocab_size,
        num_heads=1 if kind == "mtp" else 5,
        num_layers=1 if kind == "mtp" else 2,
        hidden_first=bool(seed % 2),
        block=block if kind in ("hydra++", "mtp") else None,
    )
    heads = build_heads(config, hot_ids).to(target.dtype)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(1 + noise if "norm" in name else noise)
    return heads


def make_drafter(kind: str, target: Target, texts: Sequence[Sequence[int]], seed: int) -> Drafter:
    """``lookup``, ``half-right``, or a kind of trained modules."""
    if kind == "lookup":
        return PromptLookupDrafter(max_ngram=3, min_ngram=1)
    if kind == "half-right":
        return HalfRightDrafter(texts, target.config.vocab_size, seed)
    return attach_heads(random_heads(kind, target, seed), target)


def plain_engine(target: Target, tokenizer: ByteTokenizer) -> Engine:
    """Plain decoding: nothing is drafted, the tree is empty."""
    return Engine(target, EmptyDrafter(), NONE, tokenizer, EngineLimits(max_batch_size=4))


def outcome(result: GenerationResult) -> tuple[tuple[int, ...], str, str, int]:
    """All that must not depend on drafts."""
    return result.token_ids, result.text, result.finish_reason, result.seed
