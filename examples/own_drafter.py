"""A drafter of one's own: it bets that the text repeats itself with a fixed period."""

import sys

import torch

import entmtp


class Periodic:
    name = "periodic"
    max_depth = None  # trees of any depth and width can be filled
    max_width = None

    def prefill(self, prompt, hidden, root):
        return [*prompt, root]  # the state: the text so far

    def draft(self, requests):
        return [self._fill(request) for request in requests]

    def _fill(self, request):
        text, tokens = request.state, [request.root]
        for path in request.plan.paths:  # child of rank r: period 2 + r
            tokens.append(text[(len(path) - 1) % (2 + path[-1]) - (2 + path[-1])])
        return entmtp.DraftTree(request.plan, torch.tensor(tokens))

    def commit(self, state, hidden, tokens):
        state.extend(tokens)


def main(model: str = "smollm2-135m") -> None:
    engine = entmtp.load(model, Periodic(), topology="tree8")
    prompt = engine.encode("tick tock tick tock tick tock")
    result = engine.generate(prompt, entmtp.SamplingParams(max_new_tokens=32))
    print(result.text, result.stats.mean_acceptance_length)


if __name__ == "__main__":
    main(*sys.argv[1:])
