"""The subcommands, one module each. Heavy imports are made inside the functions."""
