"""Targets: the model whose output must be preserved, behind one forward over segments."""
