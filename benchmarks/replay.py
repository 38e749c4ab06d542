"""Is replay what decoding does? Trees and policies on real prompts, prompt by prompt.

Traces the prompts, greedy and sampled, then decodes them with grown trees, with random ones that
have gaps in their ranks, and with policies that change the tree at every step. Counts the prompts
whose (tokens, steps) differ; in torch a near-tie of scores can cause that, in the native core
nothing should. Prints one line a case that differs, then one JSON document.

    python benchmarks/replay.py --prompts humaneval.jsonl --prompts gsm8k.jsonl --limit 20
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import entmtp
from entmtp.calibrate.collect import TracePrompt, TraceSettings, collect_trace
from entmtp.calibrate.grow import GrowParams, grow_all
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import Counts
from entmtp.calibrate.session import encode_records, trace_facts
from entmtp.calibrate.trace import Trace
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal, TopologyScheduler
from entmtp.topology import Topology
from entmtp.workload import read_prompts
from paired import machine, print_json


class RandomPolicy:
    """Another tree at every step."""

    policy = "random"

    def __init__(self, seed: int, trees: Sequence[Topology]) -> None:
        self._seed, self._trees = seed, trees

    def start(self) -> random.Random:
        return random.Random(self._seed)

    def choose(self, state: random.Random, signal: Signal) -> SchedulerDecision:
        del signal
        index = state.randrange(len(self._trees))
        return SchedulerDecision(f"tree{index}", self._trees[index], index)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="hydra")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--trees", type=int, default=30)
    parser.add_argument("--policies", type=int, default=3)
    parser.add_argument("--max-nodes", type=int, default=16)
    return parser.parse_args()


def random_tree(rng: random.Random, max_nodes: int, max_depth: int) -> Topology:
    """Any prefix-closed tree, small ranks more often than large ones."""
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= rng.randint(1, max_nodes):
        path = (*rng.choice(paths), min(int(rng.expovariate(0.7)), 20))
        if len(path) <= max_depth and path not in paths:
            paths.append(path)
    return Topology.from_paths(paths[1:])


def cases(trace: Trace, args: argparse.Namespace) -> dict[str, TopologyScheduler]:
    """Grown trees of all depths and sizes, random ones for the rest, and policies over both."""
    rng = random.Random(0)
    grown = grow_all(trace, GrowParams(max_nodes=args.max_nodes))
    trees = [rng.choice(grown).topology for _ in range(args.trees // 2)]
    while len(trees) < args.trees:
        trees.append(random_tree(rng, args.max_nodes, trace.max_depth))
    found: dict[str, TopologyScheduler] = {
        f"tree {index} ({tree.num_nodes} nodes)": FixedScheduler("it", tree)
        for index, tree in enumerate(trees)
    }
    return found | {
        f"policy {seed}": RandomPolicy(seed, [*trees, Topology(())])
        for seed in range(args.policies)
    }


def decoded_counts(
    engine: entmtp.Engine,
    prompts: Sequence[TracePrompt],
    sampling: SamplingParams,
    scheduler: TopologyScheduler,
) -> list[Counts]:
    """Steps and tokens of every prompt in the engine, last steps left out."""
    limits = EngineLimits(max_batch_size=len(prompts))
    it = Engine(engine.target, engine.drafter, scheduler, engine.tokenizer, limits)
    results = it.run(
        [
            Request(prompt.tokens, replace(sampling, seed=derive_seed(0, number)))
            for number, prompt in enumerate(prompts)
        ]
    )
    counts = []
    for result in results:
        steps = result.stats.steps[:-1]
        counts.append(Counts(sum(step.num_accepted + 1 for step in steps), len(steps)))
    return counts


def compare(
    engine: entmtp.Engine,
    prompts: Sequence[TracePrompt],
    temperature: float,
    args: argparse.Namespace,
    folder: Path,
) -> dict[str, object]:
    """All cases at one temperature."""
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=0)
    settings = TraceSettings(sampling)
    facts = trace_facts(engine, args.model, prompts, settings)
    file = folder / f"{temperature}.trace"
    trace = collect_trace(engine, prompts, settings, facts, file, lambda *_: None)
    compared, different = 0, []
    for name, scheduler in cases(trace, args).items():
        replayed = replay_policy(trace, scheduler).counts
        decoded = decoded_counts(engine, prompts, sampling, scheduler)
        compared += len(decoded)
        for prompt, one, other in zip(prompts, replayed, decoded, strict=True):
            if one != other:
                different.append(f"{name}, prompt {prompt.id}: replay {one}, decoding {other}")
        print(f"temperature {temperature}, {name}: {len(different)} differ", file=sys.stderr)
    return {"temperature": temperature, "compared": compared, "different": different}


def main() -> int:
    args = parse()
    engine = entmtp.load(args.model, args.drafter, backend=args.backend, dtype=args.dtype)
    records = [record for file in args.prompts for record in read_prompts(file, args.limit)]
    prompts = encode_records(engine, records)
    with tempfile.TemporaryDirectory() as temporary:
        results = [
            compare(engine, prompts, float(text), args, Path(temporary))
            for text in args.temperatures.split(",")
        ]
    for result in results:
        for line in result["different"]:  # type: ignore[attr-defined]
            print(line)
    report = {
        **machine(),
        "backend": engine.target.backend,
        "precision": engine.target.precision,
        "drafter": engine.drafter.name,
        "prompts": len(prompts),
        "results": results,
    }
    print_json(report, None)
    return int(any(result["different"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
