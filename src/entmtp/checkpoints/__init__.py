"""Files of heads: what they are, conversion to our format, and a check of the forward pass."""
