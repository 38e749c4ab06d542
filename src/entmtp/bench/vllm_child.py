"""vLLM in a process of its own, a text at a time; copied to a folder and run there by its Python.

vLLM fixes its versions of torch and transformers, so it lives in another environment. This file
needs nothing but vLLM and the standard library. The first line that it reads says what to load,
each further one is a prompt; it answers every line with one, all in JSON.
"""

import json
import os
import sys
import time
from importlib import import_module
from typing import Any, TextIO

_LONGEST_MATCH = 4  # tokens before the end that are looked up, as in vLLM's manual


def load(setting: dict[str, Any]) -> Any:
    """The engine of vLLM, eager, for one sequence."""
    speculation = None
    if setting["num_copied"]:
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": setting["num_copied"],
            "prompt_lookup_max": _LONGEST_MATCH,
        }
    return (
        import_module("vllm")
        .LLM(
            model=setting["model"],
            dtype=setting["dtype"],
            max_model_len=setting["context"],
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            speculative_config=speculation,
        )
        .llm_engine
    )


def decode(engine: Any, name: str, text: dict[str, Any]) -> dict[str, Any]:
    """Tokens, and after each step the seconds since the start and the tokens that there were."""
    vllm = import_module("vllm")
    params = vllm.SamplingParams(
        temperature=text["temperature"],
        top_p=1.0,
        top_k=-1,
        seed=text["seed"],
        max_tokens=text["max_tokens"],
        stop_token_ids=text["stop"],
        detokenize=False,
    )
    tokens: list[int] = []
    times: list[float] = []
    counts: list[int] = []
    started = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": text["prompt"]}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            times.append(time.perf_counter() - started)
            counts.append(len(tokens))
    return {"tokens": tokens, "times": times, "counts": counts}


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer every line until there are no more."""

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    engine = None
    for number, line in enumerate(lines):
        try:
            if engine is None:
                engine = load(json.loads(line))
                answer({})
            else:
                answer(decode(engine, f"text-{number}", json.loads(line)))
        except Exception as error:  # whatever vLLM refuses is told to the one who asked
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints is no answer
    serve(sys.stdin, own)
