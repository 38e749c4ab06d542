"""Drafters: Medusa and Hydra heads, and prompt lookup, behind one protocol."""
