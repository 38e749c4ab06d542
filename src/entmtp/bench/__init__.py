"""The bench: every way to decode that is compared, on the same prompts, in one run."""
