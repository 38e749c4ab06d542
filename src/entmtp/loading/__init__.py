"""From names and files to targets, tokenizers and engines."""
