"""A model of real size: the shape of Qwen2.5-0.5B, with its vocabulary of 151 936 tokens.

The child process that decodes is this file run as a script; its peak memory is its own.
"""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine
from entmtp.params import SamplingParams
from entmtp.scheduler import TopologyScheduler
from entmtp.target.base import TargetConfig
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import iter_tensors, read_config, tensor_shapes, write_model
from exactness import NONE, HalfRightDrafter, RandomScheduler, random_topology
from fakes import ByteTokenizer

CONFIG = TargetConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    context_window=32768,
    rope_theta=1000000.0,
    qkv_bias=True,
    tie_embeddings=True,
)
SETTINGS = {
    "greedy": SamplingParams(max_new_tokens=8),
    "sampled": SamplingParams(max_new_tokens=8, temperature=0.8, top_p=0.9, seed=3),
}
PROMPT = tuple(range(100, 116))
GB = 10**9


def random_weights(seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Weights of 256 normal levels, drawn as bytes, which takes a tenth of the time."""
    levels = [NormalDist().inv_cdf((level + 0.5) / 256) for level in range(256)]
    rng = np.random.default_rng(seed)
    for name, shape in tensor_shapes(CONFIG).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
            continue
        scale = 0.02 if "embed" in name else 0.04  # larger, so that layers outweigh the embedding
        table = (torch.tensor(levels) * scale).bfloat16().view(torch.int16).numpy()
        index = np.frombuffer(rng.bytes(int(np.prod(shape))), dtype=np.uint8)
        yield name, torch.from_numpy(table[index]).view(torch.bfloat16).reshape(shape)


def decode_all(folder: Path) -> dict[str, Any]:
    """Load the model in float32; decode plainly and through random trees; measure."""
    started = time.perf_counter()
    config = read_config(folder)
    target = LlamaTarget(config, iter_tensors(folder, config))
    facts: dict[str, Any] = {"load_s": time.perf_counter() - started, "runs": {}}
    tokenizer = ByteTokenizer(config.vocab_size, eos_ids=())
    rng = random.Random(5)
    trees = [random_topology(rng, max_nodes=24) for _ in range(4)]

    def decode(
        drafter: Drafter, scheduler: TopologyScheduler, sampling: SamplingParams
    ) -> dict[str, Any]:
        result = Engine(target, drafter, scheduler, tokenizer).generate(PROMPT, sampling)
        stats = result.stats
        return {
            "tokens": result.token_ids,
            "steps": [(step.num_nodes, step.num_accepted) for step in stats.steps],
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
        }

    for name, sampling in SETTINGS.items():
        plain = decode(EmptyDrafter(), NONE, sampling)
        drafter = HalfRightDrafter([[*PROMPT, *plain["tokens"]]], config.vocab_size)
        facts["runs"][name] = (plain, decode(drafter, RandomScheduler(1, trees), sampling))
    unit = 1 if sys.platform == "darwin" else 1024
    facts["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return facts


@pytest.mark.slow
def test_half_a_billion_parameters_decode_as_plainly_in_bounded_memory(tmp_path: Path) -> None:
    """Trees give the tokens of plain decoding, greedy and sampled, within 8 GB in float32."""
    free = shutil.disk_usage(tmp_path).free
    if free < 3 * GB:
        pytest.skip(f"needs 3 GB of free disk for the weights; {free / GB:.1f} GB are free")
    here = Path(__file__)
    paths = [str(here.parents[1]), str(here.parent), os.environ.get("PYTHONPATH", "")]
    try:
        write_model(tmp_path, CONFIG, random_weights(), dtype=torch.bfloat16)
        done = subprocess.run(
            [sys.executable, str(here), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    finally:
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    for plain, tree in facts["runs"].values():
        assert tree["tokens"] == plain["tokens"]
        assert len(set(plain["tokens"])) > 4
        assert sum(accepted for _, accepted in tree["steps"]) > 0
        assert sum(nodes - accepted for nodes, accepted in tree["steps"]) > 0
    assert facts["peak_bytes"] < 8 * GB


if __name__ == "__main__":
    print(json.dumps(decode_all(Path(sys.argv[1]))))
