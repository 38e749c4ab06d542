"""Every candidate's own rollout: by replay under exact verification, by decoding under typical.

The joint score that trees are grown by is optimistic; the paper (arXiv 2606.27550, phase 1) scores
the candidates anew, each with its own proposals. Under exact verification the text does not depend
on the tree, so replay of the trace gives what decoding gives. Under typical acceptance the text
depends on the tree, and every candidate has to decode.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entmtp.calibrate.collect import TracePrompt
from entmtp.calibrate.replay import Counts, self_rollout
from entmtp.calibrate.trace import Trace
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.errors import TraceError
from entmtp.files import write_text
from entmtp.params import SamplingParams, TypicalParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.topology import Topology

__all__ = ["recalibrate_by_decoding", "recalibrate_by_replay"]

_BATCH = 32


def recalibrate_by_replay(trace: Trace, trees: Sequence[Topology]) -> list[Counts]:
    """Tokens and steps of each tree on the traced texts."""
    return [self_rollout(trace, tree) for tree in trees]


def recalibrate_by_decoding(  # noqa: PLR0913 - keyword-only beyond the fifth
    engine: Engine,
    prompts: Mapping[int, TracePrompt],
    trees: Sequence[Topology],
    sampling: SamplingParams,
    typical: TypicalParams | None = None,
    *,
    work: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Counts]:
    """Tokens and steps of each tree where it decodes the prompts; last steps are left out.

    Args:
        engine: its target and drafter decode.
        prompts: number of the text in a trace -> its prompt.
        trees: candidates.
        sampling: of the texts; seeds are derived as in that trace.
        typical: typical acceptance; exact without.
        work: file of what has been found so far, for these arguments alone; a run that was cut off
            goes on behind the last tree.
        progress: told trees done and their number.

    Raises:
        TraceError: the file holds something else.
    """
    base = sampling.seed or 0
    requests = [
        Request(prompt.tokens, replace(sampling, seed=derive_seed(base, text)), typical=typical)
        for text, prompt in prompts.items()
    ]
    found = _load(work)
    limits = EngineLimits(max_batch_size=min(_BATCH, max(len(prompts), 1)))
    for number, tree in enumerate(trees, start=1):
        if number > len(found):
            scheduler = FixedScheduler("it", tree)
            it = Engine(engine.target, engine.drafter, scheduler, engine.tokenizer, limits)
            found.append(_counts(it, requests))
            if work is not None:
                write_text(work, json.dumps([[one.num_tokens, one.num_steps] for one in found]))
        if progress is not None:
            progress(number, len(trees))
    return found


def _counts(engine: Engine, requests: Sequence[Request]) -> Counts:
    tokens = steps = 0
    for result in engine.run(requests):
        inner = result.stats.steps[:-1]
        tokens += sum(step.num_accepted + 1 for step in inner)
        steps += len(inner)
    return Counts(tokens, steps)


def _load(work: Path | None) -> list[Counts]:
    if work is None or not work.exists():
        return []
    try:
        pairs = json.loads(work.read_text(encoding="utf-8"))
        return [Counts(int(tokens), int(steps)) for tokens, steps in pairs]
    except (OSError, ValueError, TypeError) as error:
        raise TraceError(f"{work}: damaged ({error}); delete it and run again") from error
