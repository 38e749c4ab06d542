"""A Hugging Face folder with a tiny random model and a byte-level tokenizer, made in a moment."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from entmtp.target.weights import tensor_shapes, write_model
from fakes import tiny_config

__all__ = ["TINY_TEMPLATE", "make_model_folder"]

TINY_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model_folder(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Write config.json, model.safetensors and tokenizer files; two layers, 259 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: index for index, token in enumerate([*alphabet, *specials])}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TINY_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = tiny_config(vocab_size=len(tokens), **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * (1.0 if "embed" in name else 0.2)
        for name, shape in tensor_shapes(config).items()
    }
    write_model(folder, config, tensors.items(), extra={"eos_token_id": tokens["<|im_end|>"]})
    return folder
