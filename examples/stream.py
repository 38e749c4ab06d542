"""Print an answer while it is decoded, sampled with a seed that makes it repeatable."""

import sys

import entmtp


def main(model: str = "smollm2-135m") -> None:
    engine = entmtp.load(model)
    sampling = entmtp.SamplingParams(max_new_tokens=48, temperature=0.7, top_p=0.95, seed=1)
    for chunk in engine.stream(engine.chat_prompt("Tell me a very short story."), sampling):
        print(chunk.text, end="", flush=True)
        if chunk.result is not None:
            print(f"\n[{chunk.result.finish_reason}, seed {chunk.result.seed}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
