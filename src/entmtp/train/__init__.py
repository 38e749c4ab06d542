"""Training of draft heads on text that the target itself wrote (self-distillation)."""
