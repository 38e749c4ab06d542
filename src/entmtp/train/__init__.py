"""Training of draft heads on text that the target itself wrote (self-distillation)."""

from entmtp.train.config import DataConfig, HeadsRecipe
from entmtp.train.run import TrainConfig, TrainedHeads, train_heads

__all__ = ["DataConfig", "HeadsRecipe", "TrainConfig", "TrainedHeads", "train_heads"]
