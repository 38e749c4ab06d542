"""Small draft heads in every published layout, each with its formulas worked out by brute force.

Every builder writes random float32 weights from a seed and returns, beside the files, a function
that evaluates the published formulas in float64, one position and one head at a time:

- Medusa: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple
  Decoding Heads"; its two own layouts and the one of vLLM.
- Hydra and Hydra++: Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa
  Decoding"; the ``mlp`` and ``prefix-mlp`` heads.
- Multi-token prediction: DeepSeek-V3 2024 (section 2.2, the layout GLM shares) and MiMo 2025.

H: hidden size. V: vocabulary. T: positions. h_t: hidden state of the target after its final norm.
x_{t+1}: the root. Head i, from 0, scores x_{t+2+i}. E: the target's input embedding.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

__all__ = [
    "Published",
    "Scores",
    "Sizes",
    "TargetArrays",
    "add_to_model",
    "decoder_layer",
    "draft_tokens",
    "hydra_mlp",
    "hydra_prefix_mlp",
    "medusa_v1",
    "medusa_v2",
    "mtp_deepseek",
    "mtp_mimo",
    "vllm_medusa",
]

HYDRA_HEADS = 4
PREFIX = "prefix_embeding_layer."  # spelt so in the published files
ROOT_NAME = "lmsys/vicuna-7b-v1.3"


@dataclass(frozen=True)
class Sizes:
    """What the heads take over from the target's configuration."""

    hidden_size: int = 32
    vocab_size: int = 259
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class TargetArrays:
    """What the formulas use of the target: rows E(x) and rows of the output head, (V, H)."""

    embedding: np.ndarray
    output: np.ndarray


# (target, hidden (t + 1, H), tokens x_0..x_{t+1}, draft tokens above) -> (V,), float64
Scores = Callable[[TargetArrays, np.ndarray, Sequence[int], Sequence[int]], np.ndarray]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Published:
    """A checkpoint on disk and its brute force; ``num_heads`` is None where depth is unbounded."""

    folder: Path
    file: Path
    num_heads: int | None
    scores: Scores


def draft_tokens(
    published: Published,
    target: TargetArrays,
    hidden: np.ndarray,
    tokens: Sequence[int],
    paths: Sequence[tuple[int, ...]],
) -> list[int]:
    """The token of every node: rank r is the r-th best score, ties go to the lower id.

    ``paths`` holds each path after its prefixes.
    """
    assert len(tokens) == len(hidden) + 1, "tokens end with the root"
    best: dict[tuple[int, ...], np.ndarray] = {}
    filled: dict[tuple[int, ...], int] = {}
    for path in paths:
        parent, rank = path[:-1], path[-1]
        if parent not in best:
            assert published.num_heads is None or len(path) <= published.num_heads, path
            above = [filled[path[:depth]] for depth in range(1, len(path))]
            scores = published.scores(target, hidden, tokens, above)
            order = np.argsort(-scores, kind="stable")
            best[parent] = order[np.isfinite(scores[order])]
        filled[path] = int(best[parent][rank])
    return [filled[path] for path in paths]


# --- Formulas


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def _linear(weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """W x + b of one vector, without b where the layout has none."""
    product = weights[name + ".weight"] @ x
    return product + weights[name + ".bias"] if name + ".bias" in weights else product


def _residual(weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """ResBlock(x) = x + SiLU(W x + b)."""
    return x + _silu(_linear(weights, name, x))


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one head's vector: pair (j, j + half) turns by position * theta^(-j / half)."""
    half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
    )


def _attention(sizes: Sizes, weights: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Causal attention over normed rows (T, H) at positions 0..T-1, one head and row at a time."""
    group = sizes.num_heads // sizes.num_kv_heads
    q, k, v = (
        np.stack([_linear(weights, f"self_attn.{n}_proj", row) for row in x]).reshape(
            len(x), -1, sizes.head_dim
        )
        for n in "qkv"
    )
    mixed = np.zeros_like(q)
    for head in range(sizes.num_heads):
        shared = head // group
        keys = np.stack([_rotate(k[p, shared], p, sizes.rope_theta) for p in range(len(x))])
        for p in range(len(x)):
            logits = keys[: p + 1] @ _rotate(q[p, head], p, sizes.rope_theta)
            logits /= np.sqrt(sizes.head_dim)
            probs = np.exp(logits - logits.max())
            mixed[p, head] = (probs / probs.sum()) @ v[: p + 1, shared]
    rows = mixed.reshape(len(x), -1)
    return np.stack([_linear(weights, "self_attn.o_proj", row) for row in rows])


def decoder_layer(sizes: Sizes, weights: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """One Llama decoder layer over the rows (T, H); names as under ``model.layers.0.``."""
    eps = sizes.rms_norm_eps
    x = x + _attention(sizes, weights, _rms_norm(x, weights["input_layernorm.weight"], eps))
    normed = _rms_norm(x, weights["post_attention_layernorm.weight"], eps)
    inner = _silu(normed @ weights["mlp.gate_proj.weight"].T)
    inner *= normed @ weights["mlp.up_proj.weight"].T
    return x + inner @ weights["mlp.down_proj.weight"].T


# --- Random weights and files


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    """Rows that map inputs of unit variance to outputs of standard deviation ``gain``."""
    return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)


def _vector(rng: np.random.Generator, size: int, std: float, mean: float = 0.0) -> np.ndarray:
    return (mean + rng.standard_normal(size) * std).astype(np.float32)


def _affine(rng: np.random.Generator, name: str, rows: int, columns: int) -> Arrays:
    return {
        name + ".weight": _matrix(rng, rows, columns),
        name + ".bias": _vector(rng, rows, 0.5),
    }


def _norm(rng: np.random.Generator, name: str, size: int) -> Arrays:
    return {name + ".weight": _vector(rng, size, 0.2, mean=1.0)}


def _block(rng: np.random.Generator, sizes: Sizes, qkv_bias: bool = False) -> Arrays:
    """A Llama decoder layer; queries and keys are large enough for uneven attention."""
    h, inner = sizes.hidden_size, sizes.intermediate_size
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    arrays = {
        "self_attn.q_proj.weight": _matrix(rng, q, h, gain=1.5),
        "self_attn.k_proj.weight": _matrix(rng, kv, h, gain=1.5),
        "self_attn.v_proj.weight": _matrix(rng, kv, h),
        "self_attn.o_proj.weight": _matrix(rng, h, q),
        "mlp.gate_proj.weight": _matrix(rng, inner, h),
        "mlp.up_proj.weight": _matrix(rng, inner, h),
        "mlp.down_proj.weight": _matrix(rng, h, inner),
        **_norm(rng, "input_layernorm", h),
        **_norm(rng, "post_attention_layernorm", h),
    }
    if qkv_bias:
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            arrays[f"self_attn.{name}_proj.bias"] = _vector(rng, size, 0.5)
    return arrays


def _prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {prefix + name: array for name, array in arrays.items()}


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}


def _doubles(arrays: Arrays) -> Arrays:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """One tensor for each array: names that are tied share their storage."""
    unique = {id(array): torch.tensor(array) for array in arrays.values()}
    return {name: unique[id(array)] for name, array in arrays.items()}


def _write(folder: Path, name: str, arrays: Arrays, config: Mapping[str, object]) -> Path:
    """Write config.json and the weights: by torch.save for .pt, else as safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    file = folder / name
    if file.suffix == ".pt":
        torch.save(_tensors(arrays), file)
    else:
        apart = {n: t.clone() for n, t in _tensors(arrays).items()}
        save_file(apart, file, metadata={"format": "pt"})
    return file


# --- Medusa


def _medusa_blocks(rng: np.random.Generator, h: int, num_layers: int, num_heads: int) -> Arrays:
    """The residual blocks of every head; the layers of one head are tied."""
    arrays: Arrays = {}
    for head in range(num_heads):
        tied = _affine(rng, "linear", h, h)
        for layer in range(num_layers):
            arrays |= _prefixed(f"{head}.{layer}.", tied)
    return arrays


def _medusa_hidden(
    weights: Mapping[str, np.ndarray], head: int, num_layers: int, x: np.ndarray
) -> np.ndarray:
    for layer in range(num_layers):
        x = _residual(weights, f"{head}.{layer}.linear", x)
    return x


def medusa_v1(
    folder: Path, sizes: Sizes, *, seed: int = 0, num_layers: int = 1, num_heads: int = 5
) -> Published:
    """Medusa v1: every head brings its output rows; config.json names 2 heads, as published."""
    rng = np.random.default_rng(seed)
    arrays = _medusa_blocks(rng, sizes.hidden_size, num_layers, num_heads)
    for head in range(num_heads):
        rows = _matrix(rng, sizes.vocab_size, sizes.hidden_size)
        arrays[f"{head}.{num_layers}.weight"] = rows
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": ROOT_NAME,
    }
    weights = _doubles(arrays)

    def scores(
        target: TargetArrays, hidden: np.ndarray, tokens: Sequence[int], path: Sequence[int]
    ) -> np.ndarray:
        head = len(path)
        x = _medusa_hidden(weights, head, num_layers, hidden[-1])
        return weights[f"{head}.{num_layers}.weight"] @ x

    file = _write(folder, "medusa_lm_head.pt", arrays, config)
    return Published(folder, file, num_heads, scores)


def medusa_v2(
    folder: Path, sizes: Sizes, *, seed: int = 0, num_layers: int = 1, num_heads: int = 3
) -> Published:
    """Medusa v2: residual blocks only; the target's output head gives the scores."""
    rng = np.random.default_rng(seed)
    arrays = _medusa_blocks(rng, sizes.hidden_size, num_layers, num_heads)
    config = {
        "version": "2",
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": ROOT_NAME,
    }
    weights = _doubles(arrays)

    def scores(
        target: TargetArrays, hidden: np.ndarray, tokens: Sequence[int], path: Sequence[int]
    ) -> np.ndarray:
        return target.output @ _medusa_hidden(weights, len(path), num_layers, hidden[-1])

    file = _write(folder, "medusa_lm_head.safetensors", arrays, config)
    return Published(folder, file, num_heads, scores)


def vllm_medusa(
    folder: Path,
    sizes: Sizes,
    *,
    seed: int = 0,
    rows: Literal["full", "truncated", "mapped"] = "full",
    shared: bool = False,
    bias: bool = False,
    prefix: str = "",
    num_layers: int = 1,
    num_heads: int = 3,
) -> Published:
    """Medusa as vLLM reads it; layers are not tied.

    ``rows``: "full" has no token map; "truncated" has a row for each token of the map, in its
    order; "mapped" has V rows, of which the map picks. ``shared``: one output head for all.
    """
    rng = np.random.default_rng(seed)
    h, v = sizes.hidden_size, sizes.vocab_size
    kept = v if rows == "full" else v // 3
    arrays: Arrays = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            arrays |= _affine(rng, f"blocks.{head}.layers.{layer}", h, h)
    if not bias:
        arrays = {name: array for name, array in arrays.items() if not name.endswith(".bias")}
    for head in range(1 if shared else num_heads):
        arrays[f"lm_heads.{head}.weight"] = _matrix(rng, kept if rows == "truncated" else v, h)
    token_map = np.arange(v) if rows == "full" else rng.permutation(v)[:kept]
    weights = _doubles(arrays)
    if rows != "full":
        arrays["token_map"] = token_map.astype(np.int64)

    def scores(
        target: TargetArrays, hidden: np.ndarray, tokens: Sequence[int], path: Sequence[int]
    ) -> np.ndarray:
        x = hidden[-1]
        for layer in range(num_layers):
            x = _residual(weights, f"blocks.{len(path)}.layers.{layer}", x)
        output = weights[f"lm_heads.{0 if shared else len(path)}.weight"]
        result = np.full(v, -np.inf)
        for place, token in enumerate(token_map):
            result[token] = output[place if rows == "truncated" else token] @ x
        return result

    config = {
        "model_type": "medusa",
        "hidden_size": h,
        "vocab_size": v,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": kept,
        "original_lm_head": shared,
        "medusa_fc_bias": bias,
    }
    file = _write(folder, "model.safetensors", _prefixed(prefix, arrays), config)
    return Published(folder, file, num_heads, scores)


# --- Hydra


def _hydra_heads(
    rng: np.random.Generator, sizes: Sizes, blocks: Sequence[int], output: str
) -> Arrays:
    """The heads: ``blocks`` numbers their blocks, ``output`` ends the output layer's name."""
    h = sizes.hidden_size
    arrays: Arrays = {}
    for head in range(HYDRA_HEADS):
        first = f"hydra_mlp.{head}.{blocks[0]}."
        arrays |= _affine(rng, first + "linear", h, (head + 2) * h)
        arrays |= _affine(rng, first + "res_connection", h, (head + 2) * h)
        tied = _affine(rng, "linear", h, h)
        for block in blocks[1:]:
            arrays |= _prefixed(f"hydra_mlp.{head}.{block}.", tied)
        arrays |= _affine(rng, f"hydra_lm_head.{head}{output}", sizes.vocab_size, h)
    return arrays


def _hydra_scores(
    weights: Mapping[str, np.ndarray],
    blocks: Sequence[int],
    output: str,
    state: Callable[[np.ndarray], np.ndarray],
) -> Scores:
    """Head i reads concat[s_t, E(x_{t+1}), ..., E(x_{t+1+i})]; ``state`` maps h_0..h_t to s_t."""

    def scores(
        target: TargetArrays, hidden: np.ndarray, tokens: Sequence[int], path: Sequence[int]
    ) -> np.ndarray:
        head = len(path)
        seen = [target.embedding[token] for token in (tokens[-1], *path)]
        u = np.concatenate([state(hidden), *seen])
        first = f"hydra_mlp.{head}.{blocks[0]}."
        x = _linear(weights, first + "res_connection", u)
        x = x + _silu(_linear(weights, first + "linear", u))
        for block in blocks[1:]:
            x = _residual(weights, f"hydra_mlp.{head}.{block}.linear", x)
        return _linear(weights, f"hydra_lm_head.{head}{output}", x)

    return scores


def _hydra_config(arch: str, num_layers: int) -> dict[str, object]:
    return {
        "hydra_num_heads": HYDRA_HEADS,
        "hydra_num_layers": num_layers,
        "hydra_head_arch": arch,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": ROOT_NAME,
    }


def hydra_mlp(
    folder: Path, sizes: Sizes, target: TargetArrays, *, seed: int = 0, num_layers: int = 1
) -> Published:
    """Hydra: s_t = h_t; blocks 0..num_layers-1, those after the first tied."""
    rng = np.random.default_rng(seed)
    blocks = range(num_layers)
    arrays = _hydra_heads(rng, sizes, blocks, "")
    scores = _hydra_scores(_doubles(arrays), blocks, "", lambda hidden: hidden[-1])
    arrays["input_embed_fn.weight"] = target.embedding.astype(np.float32)
    file = _write(folder, "hydra_lm_head.pt", arrays, _hydra_config("mlp", num_layers))
    return Published(folder, file, HYDRA_HEADS, scores)


def hydra_prefix_mlp(
    folder: Path, sizes: Sizes, target: TargetArrays, *, seed: int = 0, num_layers: int = 4
) -> Published:
    """Hydra++: s_t is a decoder layer with final norm run over h_0..h_t; blocks 1, 3, 5, ..."""
    rng = np.random.default_rng(seed)
    blocks = range(1, 2 * num_layers, 2)
    arrays = _hydra_heads(rng, sizes, blocks, ".1")
    layer = _block(rng, sizes)
    arrays |= _prefixed(PREFIX + "layers.0.", layer)
    arrays |= _norm(rng, PREFIX + "norm", sizes.hidden_size)
    weights = _doubles(arrays)

    def state(hidden: np.ndarray) -> np.ndarray:
        last = decoder_layer(sizes, _under(PREFIX + "layers.0.", weights), hidden)[-1]
        return _rms_norm(last, weights[PREFIX + "norm.weight"], sizes.rms_norm_eps)

    half = sizes.head_dim // 2
    frequencies = sizes.rope_theta ** (-np.arange(half) / half)
    arrays |= {
        PREFIX + "layers.0.self_attn.rotary_emb.inv_freq": frequencies.astype(np.float32),
        PREFIX + "embed_tokens.weight": _matrix(rng, sizes.vocab_size, sizes.hidden_size),
        "input_embed_fn.weight": target.embedding.astype(np.float32),
    }
    file = _write(folder, "hydra_lm_head.pt", arrays, _hydra_config("prefix-mlp", num_layers))
    return Published(folder, file, HYDRA_HEADS, _hydra_scores(weights, blocks, ".1", state))


# --- Multi-token prediction


def _mtp_scores(
    sizes: Sizes,
    layer: Mapping[str, np.ndarray],
    join: Callable[[np.ndarray, np.ndarray], np.ndarray],
    final_norm: np.ndarray,
) -> Scores:
    """Row p is join(E(x_{p+1}), h_p); past t, the row before gives g in the place of h_p."""

    def scores(
        target: TargetArrays, hidden: np.ndarray, tokens: Sequence[int], path: Sequence[int]
    ) -> np.ndarray:
        following = [*tokens[1:], *path]
        carried = list(hidden)
        while True:
            rows = [join(target.embedding[following[p]], h) for p, h in enumerate(carried)]
            last = decoder_layer(sizes, layer, np.stack(rows))[-1]
            g = _rms_norm(last, final_norm, sizes.rms_norm_eps)
            if len(carried) == len(following):
                return target.output @ g
            carried.append(g)

    return scores


def mtp_deepseek(
    sizes: Sizes, layer: int, *, target: TargetArrays, with_copies: bool = False, seed: int = 0
) -> tuple[dict[str, torch.Tensor], Scores]:
    """DeepSeek-V3 and GLM: layer ``layer`` of the model; joins [enorm(E), hnorm(h)].

    ``with_copies`` adds the target's embedding and output head under the layer's names.
    """
    rng = np.random.default_rng(seed)
    h, eps = sizes.hidden_size, sizes.rms_norm_eps
    block = _block(rng, sizes)
    own = {"eh_proj.weight": _matrix(rng, h, 2 * h)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        own |= _norm(rng, name, h)
    weights = _doubles(own)

    def join(embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        first = _rms_norm(embedded, weights["enorm.weight"], eps)
        second = _rms_norm(hidden, weights["hnorm.weight"], eps)
        return weights["eh_proj.weight"] @ np.concatenate([first, second])

    scores = _mtp_scores(sizes, _doubles(block), join, weights["shared_head.norm.weight"])
    if with_copies:
        own["embed_tokens.weight"] = target.embedding.astype(np.float32)
        own["shared_head.head.weight"] = target.output.astype(np.float32)
    return _tensors(_prefixed(f"model.layers.{layer}.", own | block)), scores


def mtp_mimo(
    sizes: Sizes, *, seed: int = 0, qkv_bias: bool = True
) -> tuple[dict[str, torch.Tensor], Scores]:
    """MiMo: ``model.mtp_layers.0.``; joins [hidden_layernorm(h), token_layernorm(E)]."""
    rng = np.random.default_rng(seed)
    h, eps = sizes.hidden_size, sizes.rms_norm_eps
    block = _block(rng, sizes, qkv_bias)
    own = {"input_proj.weight": _matrix(rng, h, 2 * h)}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        own |= _norm(rng, name, h)
    weights = _doubles(own)

    def join(embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        first = _rms_norm(hidden, weights["hidden_layernorm.weight"], eps)
        second = _rms_norm(embedded, weights["token_layernorm.weight"], eps)
        return weights["input_proj.weight"] @ np.concatenate([first, second])

    scores = _mtp_scores(sizes, _doubles(block), join, weights["final_layernorm.weight"])
    return _tensors(_prefixed("model.mtp_layers.0.", own | block)), scores


def add_to_model(
    model_folder: Path, tensors: Mapping[str, torch.Tensor], **config_changes: object
) -> Path:
    """Rewrite a model folder with more tensors and other config entries; the weights file."""
    file = model_folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    present = load_file(file)
    assert not present.keys() & tensors.keys(), "the model has these tensors"
    save_file({**present, **tensors}, file, metadata=metadata)
    place = model_folder / "config.json"
    config = json.loads(place.read_text()) | config_changes
    place.write_text(json.dumps(config, indent=2))
    return file
