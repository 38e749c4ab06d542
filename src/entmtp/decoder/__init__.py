"""One block of a Llama-family decoder and what it reads: rotary positions, caches, tree attention.

Targets are stacks of such blocks; a Hydra++ prefix layer and a recurrent drafter hold one each.
"""
