"""A tiny model, heads for it, and prompts of two tasks, as files for the command line."""

import json
from pathlib import Path

from entmtp.loading.loader import load_target
from published import Sizes, TargetArrays, hydra_mlp
from tiny_model import make_model_folder


def make_workload(root: Path) -> dict[str, Path]:
    """Name of a file or folder -> its path."""
    model = make_model_folder(root / "model")
    embedding = load_target(model).embedding().double().numpy()
    arrays = TargetArrays(embedding, embedding)
    heads = hydra_mlp(root / "hydra", Sizes(), arrays, num_layers=2).file
    lines = [
        json.dumps({"id": f"{task}{number}", "task": task, "turns": [f"{task} {number} word"]})
        for task in ("code", "chat")
        for number in range(4)
    ]
    prompts = root / "prompts.jsonl"
    prompts.write_text("\n".join(lines))
    return {"root": root, "model": model, "heads": heads, "prompts": prompts}
