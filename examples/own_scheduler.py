"""A scheduler of one's own: a big tree while the model is sure, none while it is not."""

import sys

import entmtp


class SureOrNot:
    policy = "sure-or-not"

    def __init__(self, threshold: float) -> None:
        trees = entmtp.named_topologies()
        self._threshold = threshold
        self._big = entmtp.SchedulerDecision("tree16", trees["tree16"])
        self._none = entmtp.SchedulerDecision("none", trees["none"])

    def start(self) -> None:
        """No state is needed; what is returned here comes back at each call of ``choose``."""

    def choose(self, state: None, signal: entmtp.Signal) -> entmtp.SchedulerDecision:
        return self._big if signal.p0 >= self._threshold else self._none


def main(model: str = "smollm2-135m") -> None:
    engine = entmtp.load(model, policy=SureOrNot(threshold=0.3))
    prompt = engine.chat_prompt("Count from one to ten.")
    result = engine.generate(prompt, entmtp.SamplingParams(max_new_tokens=48))
    print(result.text)
    print(dict(result.stats.topology_steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
