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
from safetensors.torch import load, save_file

__all__ = [
    "Published",
    "Scores",
    "Sizes",
    "TargetArrays",
    "add_to_model",
    "draft_tokens",
    "hydra_mlp",
    "hydra_prefix_mlp",
    "medusa_v1",
    "medusa_v2",
    "mtp_deepseek",
    "mtp_mimo",
    "vllm_medusa",
]

Array = np.ndarray
Arrays = dict[str, Array]
Ids = Sequence[int]
Paths = Sequence[tuple[int, ...]]

HYDRA_HEADS = 4
PREFIX = "prefix_embeding_layer."  # spelt so in the published files
BASE = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


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
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class TargetArrays:
    """What the formulas use of the target: rows E(x) and rows of the output head, (V, H)."""

    embedding: Array
    output: Array


# (target, hidden (t + 1, H), tokens x_0..x_{t+1}, draft tokens above) -> (V,), float64
Scores = Callable[[TargetArrays, Array, Ids, Ids], Array]


@dataclass(frozen=True)
class Published:
    """A checkpoint on disk and its brute force; ``num_heads`` is None where depth is unbounded."""

    folder: Path
    file: Path
    num_heads: int | None
    scores: Scores


def draft_tokens(
    published: Published, target: TargetArrays, hidden: Array, tokens: Ids, paths: Paths
) -> list[int]:
    """The token of every node: rank r is the r-th best score, ties go to the lower id.

    ``paths`` holds each path after its prefixes.
    """
    assert len(tokens) == len(hidden) + 1, "tokens end with the root"
    best: dict[tuple[int, ...], Array] = {}
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


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def _linear(weights: Arrays, name: str, x: Array) -> Array:
    """W x + b of one vector, without b where the layout has none."""
    product = weights[name + ".weight"] @ x
    return product + weights[name + ".bias"] if name + ".bias" in weights else product


def _residual(weights: Arrays, name: str, x: Array) -> Array:
    """ResBlock(x) = x + SiLU(W x + b)."""
    return x + _silu(_linear(weights, name, x))


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: Array, position: int, theta: float) -> Array:
    """RoPE of one head's vector: pair (j, j + half) turns by position * theta^(-j / half)."""
    half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def _attention(sizes: Sizes, weights: Arrays, x: Array) -> Array:
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


def decoder_layer(sizes: Sizes, weights: Arrays, x: Array) -> Array:
    """One Llama decoder layer over the rows (T, H); names as under ``model.layers.0.``."""
    eps = sizes.rms_norm_eps
    x = x + _attention(sizes, weights, _rms_norm(x, weights["input_layernorm.weight"], eps))
    normed = _rms_norm(x, weights["post_attention_layernorm.weight"], eps)
    inner = _silu(normed @ weights["mlp.gate_proj.weight"].T)
    inner *= normed @ weights["mlp.up_proj.weight"].T
    return x + inner @ weights["mlp.down_proj.weight"].T


# --- Random weights and files


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> Array:
    """Rows that map inputs of unit variance to outputs of standard deviation ``gain``."""
    return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)


def _vector(rng: np.random.Generator, size: int, std: float, mean: float = 0.0) -> Array:
    return (mean + rng.standard_normal(size) * std).astype(np.float32)


def _affine(rng: np.random.Generator, name: str, rows: int, columns: int) -> Arrays:
    return {name + ".weight": _matrix(rng, rows, columns), name + ".bias": _vector(rng, rows, 0.5)}


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
        apart = {name: torch.tensor(array) for name, array in arrays.items()}
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


def _medusa_hidden(weights: Arrays, head: int, num_layers: int, x: Array) -> Array:
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
        arrays[f"{head}.{num_layers}.weight"] = _matrix(rng, sizes.vocab_size, sizes.hidden_size)
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers, **BASE}
    weights = _doubles(arrays)

    def scores(target: TargetArrays, hidden: Array, tokens: Ids, path: Ids) -> Array:
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
    counts = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    config = {"version": "2", **counts, **BASE}
    weights = _doubles(arrays)

    def scores(target: TargetArrays, hidden: Array, tokens: Ids, path: Ids) -> Array:
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

    def scores(target: TargetArrays, hidden: Array, tokens: Ids, path: Ids) -> Array:
        x = hidden[-1]
        for layer in range(num_layers):
            x = _residual(weights, f"blocks.{len(path)}.layers.{layer}", x)
        matrix = weights[f"lm_heads.{0 if shared else len(path)}.weight"]
        result = np.full(v, -np.inf)
        for place, token in enumerate(token_map):
            result[token] = matrix[place if rows == "truncated" else token] @ x
        return result

    shape = {"model_type": "medusa", "hidden_size": h, "vocab_size": v, "num_heads": num_heads}
    limits = {"num_hidden_layers": num_layers, "max_paths": 64, "topk": 10}
    output = {"truncated_vocab_size": kept, "original_lm_head": shared, "medusa_fc_bias": bias}
    config = shape | limits | output
    file = _write(folder, "model.safetensors", _prefixed(prefix, arrays), config)
    return Published(folder, file, num_heads, scores)


# --- Hydra


def _hydra_heads(rng: np.random.Generator, sizes: Sizes, blocks: Ids, output: str) -> Arrays:
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
    weights: Arrays, blocks: Ids, output: str, state: Callable[[Array], Array]
) -> Scores:
    """Head i reads concat[s_t, E(x_{t+1}), ..., E(x_{t+1+i})]; ``state`` maps h_0..h_t to s_t."""

    def scores(target: TargetArrays, hidden: Array, tokens: Ids, path: Ids) -> Array:
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
    own = {"hydra_num_heads": HYDRA_HEADS, "hydra_num_layers": num_layers, "hydra_head_arch": arch}
    return {**own, "grounded_heads": True, "hidden_state_offset": 0, **BASE}


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
    block = _block(rng, sizes)
    arrays |= _prefixed(PREFIX + "layers.0.", block)
    arrays |= _norm(rng, PREFIX + "norm", sizes.hidden_size)
    weights, layer = _doubles(arrays), _doubles(block)

    def state(hidden: Array) -> Array:
        last = decoder_layer(sizes, layer, hidden)[-1]
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

Layer = tuple[dict[str, torch.Tensor], Scores]  # what to add to a model


def _mtp(
    rng: np.random.Generator, sizes: Sizes, join: str, inputs: Ids, norms: Sequence[str], bias: bool
) -> tuple[Arrays, Scores]:
    """Row p joins the normed E(x_{p+1}) and h_p; past t, the g of the row before stands for h_p.

    ``inputs`` orders the two, 0 for E and 1 for h; ``norms`` names their norms and the final one.
    """
    h, eps = sizes.hidden_size, sizes.rms_norm_eps
    own = {join + ".weight": _matrix(rng, h, 2 * h)}
    for name in norms:
        own |= _norm(rng, name, h)
    block = _block(rng, sizes, bias)
    weights, layer = _doubles(own), _doubles(block)
    scales = [weights[name + ".weight"] for name in norms]

    def scores(target: TargetArrays, hidden: Array, tokens: Ids, path: Ids) -> Array:
        following = [*tokens[1:], *path]
        carried = list(hidden)
        while True:
            rows = []
            for token, state in zip(following, carried, strict=False):
                parts = (target.embedding[token], state)
                normed = [_rms_norm(parts[i], scales[n], eps) for n, i in enumerate(inputs)]
                rows.append(_linear(weights, join, np.concatenate(normed)))
            g = _rms_norm(decoder_layer(sizes, layer, np.stack(rows))[-1], scales[2], eps)
            if len(carried) == len(following):
                return target.output @ g
            carried.append(g)

    return own | block, scores


def mtp_deepseek(
    sizes: Sizes, layer: int, *, target: TargetArrays, with_copies: bool = False, seed: int = 0
) -> Layer:
    """DeepSeek-V3 and GLM: layer ``layer`` of the model; joins [enorm(E), hnorm(h)].

    ``with_copies`` adds the target's embedding and output head under the layer's names.
    """
    rng, norms = np.random.default_rng(seed), ("enorm", "hnorm", "shared_head.norm")
    arrays, scores = _mtp(rng, sizes, "eh_proj", (0, 1), norms, False)
    if with_copies:
        arrays["embed_tokens.weight"] = target.embedding.astype(np.float32)
        arrays["shared_head.head.weight"] = target.output.astype(np.float32)
    return _tensors(_prefixed(f"model.layers.{layer}.", arrays)), scores


def mtp_mimo(sizes: Sizes, *, seed: int = 0, qkv_bias: bool = True) -> Layer:
    """MiMo: ``model.mtp_layers.0.``; joins [hidden_layernorm(h), token_layernorm(E)]."""
    rng, norms = np.random.default_rng(seed), ("hidden_layernorm", "token_layernorm")
    arrays, scores = _mtp(rng, sizes, "input_proj", (1, 0), (*norms, "final_layernorm"), qkv_bias)
    return _tensors(_prefixed("model.mtp_layers.0.", arrays)), scores


def add_to_model(
    model_folder: Path, tensors: Mapping[str, torch.Tensor], **config_changes: object
) -> Path:
    """Rewrite a model folder with more tensors and other config entries; the weights file."""
    file = model_folder / "model.safetensors"
    present = load(file.read_bytes())  # no map of the file that is written next
    assert not present.keys() & tensors.keys(), "the model has these tensors"
    save_file({**present, **tensors}, file, metadata={"format": "pt"})
    place = model_folder / "config.json"
    config = json.loads(place.read_text()) | config_changes
    place.write_text(json.dumps(config, indent=2))
    return file
