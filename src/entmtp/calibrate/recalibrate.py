"""Every candidate's own rollout: by replay under exact verification, by decoding under typical.

The joint score that trees are grown by is optimistic; the paper (arXiv 2606.27550, phase 1) scores
the candidates anew, each with its own proposals. Under exact verification the text does not depend
on the tree, so replay of the trace gives what decoding gives. Under typical acceptance the text
depends on the tree, and every candidate has to decode.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from entmtp.calibrate.collect import TracePrompt
from entmtp.calibrate.replay import Counts, self_rollout
from entmtp.calibrate.trace import Trace
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.params import SamplingParams, TypicalParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.topology import Topology

__all__ = ["recalibrate_by_decoding", "recalibrate_by_replay"]

_BATCH = 32


def recalibrate_by_replay(trace: Trace, trees: Sequence[Topology]) -> list[Counts]:
    """Tokens and steps of each tree on the traced texts."""
    return [self_rollout(trace, tree) for tree in trees]


def recalibrate_by_decoding(
    engine: Engine,
    prompts: Sequence[TracePrompt],
    trees: Sequence[Topology],
    sampling: SamplingParams,
    typical: TypicalParams | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Counts]:
    """Tokens and steps of each tree where it decodes the prompts; last steps are left out.

    Args:
        engine: its target and drafter decode.
        prompts: what is decoded.
        trees: candidates.
        sampling: of the texts; seeds are derived as in a trace.
        typical: typical acceptance; exact without.
        progress: told trees done and their number.
    """
    base = sampling.seed or 0
    requests = [
        Request(p.tokens, replace(sampling, seed=derive_seed(base, i)), typical=typical)
        for i, p in enumerate(prompts)
    ]
    found = []
    limits = EngineLimits(max_batch_size=min(_BATCH, max(len(prompts), 1)))
    for number, tree in enumerate(trees, start=1):
        scheduler = FixedScheduler("it", tree)
        it = Engine(engine.target, engine.drafter, scheduler, engine.tokenizer, limits)
        tokens = steps = 0
        for result in it.run(requests):
            inner = result.stats.steps[:-1]
            tokens += sum(step.num_accepted + 1 for step in inner)
            steps += len(inner)
        found.append(Counts(tokens, steps))
        if progress is not None:
            progress(number, len(trees))
    return found
