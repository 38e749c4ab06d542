"""Decode one prompt and show what speculation gave."""

import sys

import entmtp


def main(model: str = "smollm2-135m") -> None:
    engine = entmtp.load(model)
    prompt = engine.chat_prompt("Name three rivers in Europe.")
    result = engine.generate(prompt, entmtp.SamplingParams(max_new_tokens=48))
    print(result.text)
    stats = result.stats
    print(f"{stats.num_tokens} tokens in {stats.num_steps} steps ({result.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
