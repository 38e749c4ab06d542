"""Milliseconds of filling a draft tree in the native core, and by its twin in torch.

Both drafters are timed in turn in one process, each behind a step of the target, so that weights
come from memory as they do in decoding. A tree of R rows has R nodes at every depth, each but the
last with one child. Low percentiles are shown beside medians, for machines that do other work.
Prints a table, then one JSON document.

    python benchmarks/draft_cost.py --kinds hydra,medusa,mtp --rows 1,2,4,8 --depths 1,2,3,4

Kinds without shipped heads get random ones, with a block of the target's sizes: times do not
depend on weights.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

import entmtp
from entmtp.decoder.config import BlockConfig
from entmtp.drafters.base import Drafter, DraftRequest
from entmtp.drafters.heads import KINDS, Heads, HeadsConfig, build_heads
from entmtp.loading.assets import resolve_model
from entmtp.loading.drafters import (
    heads_of_source,
    make_drafter,
    make_torch_drafter,
    shipped_heads,
    source_of,
)
from entmtp.loading.loader import load_target
from entmtp.target.base import Segment
from entmtp.target.native import NativeTarget
from entmtp.topology import Topology
from paired import machine, print_json

LOW = 10
"""The low percentile that is shown."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kinds", default="hydra,medusa,hydra++,mtp", help=", ".join(KINDS))
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--depths", default="1,2,3,4")
    parser.add_argument("--hot", type=int, default=8192, help="columns of random heads")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the JSON document to this file")
    args = parser.parse_args(argv)
    args.kinds = args.kinds.split(",")
    for kind in args.kinds:
        if kind not in KINDS:
            parser.error(f"kind {kind!r}: it must be one of {', '.join(KINDS)}")
    for name in ("rows", "depths"):
        values = [int(t) if t.isdecimal() else 0 for t in getattr(args, name).split(",")]
        if not all(1 <= value <= 32 for value in values):
            parser.error(f"--{name}: give whole numbers from 1 to 32, such as 1,4")
        setattr(args, name, values)
    for name, most in (("context", 4096), ("threads", 64), ("repeats", 10000), ("hot", 1 << 20)):
        if not 1 <= getattr(args, name) <= most:
            parser.error(f"--{name}: give a whole number from 1 to {most}")
    return args


def make_heads(kind: str, target: NativeTarget, model: str, hot: int) -> Heads:
    """The shipped heads of a kind, or random ones."""
    if f"{model}/{kind}" in shipped_heads():
        source = source_of(kind, model)
        assert source is not None  # noqa: S101 - it is listed
        return heads_of_source(source, target, model)
    sizes = {name: getattr(target.config, name) for name in BlockConfig.__dataclass_fields__}
    config = HeadsConfig(
        kind=kind,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        num_heads=1 if kind == "mtp" else 4,
        block=BlockConfig(**sizes) if kind in ("hydra++", "mtp") else None,
    )
    torch.manual_seed(0)
    hot_ids = torch.randperm(target.config.vocab_size)[:hot]
    return build_heads(config, hot_ids).requires_grad_(False)


def tree_of(rows: int, depth: int) -> Topology:
    """R chains behind the root."""
    paths = [(row, *(0,) * (length - 1)) for row in range(rows) for length in range(1, depth + 1)]
    return Topology.from_paths(paths)


class Sequenced:
    """A drafter on one text, which grows by two tokens a step."""

    def __init__(self, drafter: Drafter, hidden: torch.Tensor, prompt: Sequence[int]) -> None:
        self.drafter, self._hidden = drafter, hidden
        self._state = drafter.prefill(prompt, hidden, 1)
        self.draft(Topology.from_paths([(0,)]))

    def draft(self, tree: Topology) -> float:
        """Seconds of one draft; the commit before it is not counted."""
        self.drafter.commit(self._state, self._hidden[:2], [3, 1])
        request = DraftRequest(self._state, 1, tree)
        start = time.perf_counter()
        self.drafter.draft([request])
        return time.perf_counter() - start


def time_kind(
    target: NativeTarget, drafters: dict[str, Drafter], args: argparse.Namespace
) -> list[dict[str, object]]:
    """One entry for each shape, drafters and shapes in turn."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(target.config.vocab_size, (args.context,), generator=generator)
    cache = target.new_cache(args.context + 8)
    output = target.forward([Segment(cache, prompt, np.arange(args.context))], needs_logits=False)
    cache.commit(range(args.context))
    texts = {
        name: Sequenced(drafter, output.hidden[0], prompt.tolist())
        for name, drafter in drafters.items()
    }
    trees = {(n, depth): tree_of(n, depth) for n in args.rows for depth in args.depths}
    found: dict[tuple[int, int], dict[str, list[float]]] = {
        shape: {name: [] for name in texts} for shape in trees
    }
    for _ in range(args.repeats):
        for shape, tree in trees.items():
            for name, text in texts.items():
                target.forward([Segment(cache, prompt[:1], np.arange(1))], needs_logits=False)
                found[shape][name].append(1000 * text.draft(tree))
    entries: list[dict[str, object]] = []
    for (rows, depth), times in found.items():
        entry: dict[str, object] = {"rows": rows, "depth": depth}
        for name, values in times.items():
            entry[f"{name}_low_ms"] = float(np.percentile(values, LOW))
            entry[f"{name}_median_ms"] = median(values)
        pairs = zip(times["torch"], times["core"], strict=True)
        entry["ratio"] = median(old / new for old, new in pairs)
        entries.append(entry)
    return entries


def print_table(kind: str, entries: Sequence[dict[str, object]]) -> None:
    print(f"{kind}: ms of a draft, {LOW} % percentile (median)")
    print(f"{'rows':>5}{'depth':>6}{'torch':>16}{'core':>16}{'ratio':>8}")
    for e in entries:
        cells = [f"{e[f'{n}_low_ms']:.2f} ({e[f'{n}_median_ms']:.2f})" for n in ("torch", "core")]
        print(f"{e['rows']:>5}{e['depth']:>6}{cells[0]:>16}{cells[1]:>16}{e['ratio']:>8.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    report: dict[str, object] = {}
    try:
        model = resolve_model(args.model)
        target = load_target(model, backend="native")
        assert isinstance(target, NativeTarget)  # noqa: S101 - it was asked for
        target.set_threads(args.threads)
        for kind in args.kinds:
            heads = make_heads(kind, target, args.model, args.hot)
            drafters = {
                "torch": make_torch_drafter(copy.deepcopy(heads), target),
                "core": make_drafter(heads, target),
            }
            report[kind] = time_kind(target, drafters, args)
            print_table(kind, report[kind])  # type: ignore[arg-type]
    except entmtp.EntmtpError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    facts = {"model": args.model, "backend": target.backend, "core_threads": args.threads}
    facts |= {name: getattr(args, name) for name in ("context", "repeats", "hot")}
    print_json({**machine(), **facts, "draft_ms": report}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
