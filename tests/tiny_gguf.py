"""A tiny GGUF file, laid out as the converter of llama.cpp does, tokenizer included."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN, INNER, LAYERS = HEADS * HEAD_DIM, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ h", "u s", "e r", "us er"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes as byte-level BPE spells them, merged tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    return SPECIAL + letters + [merge.replace(" ", "") for merge in MERGES]


def interleave(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The row order of architecture ``llama``: row i beside row i + head_dim/2."""
    order = []
    for head in range(num_heads):
        for i in range(HEAD_DIM // 2):
            order += [head * HEAD_DIM + i, head * HEAD_DIM + i + HEAD_DIM // 2]
    return rows[order]


def make_tensors(seed: int = 3) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights under the GGUF names, in the Hugging Face row order; a tied model."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(vocabulary()), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes.update({f"blk.{layer}.{name}.weight": shape for name, shape in block.items()})
    return {name: rng.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, npt.NDArray[np.float32]],
    *,
    arch: str = "llama",
    quantised: tuple[str, ...] = (),
    pre: str = "smollm",
    extra: dict[str, int | float | str | list[int]] | None = None,
) -> None:
    """Write tensors as F32, those of ``quantised`` as Q8_0; q and k permuted for ``llama``."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    _add_tokenizer(writer, pre)
    for key, value in (extra or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in tensors.items():
        if arch == "llama" and ".attn_q." in name:
            values = interleave(values, HEADS)
        elif arch == "llama" and ".attn_k." in name:
            values = interleave(values, KV_HEADS)
        if name in quantised:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
