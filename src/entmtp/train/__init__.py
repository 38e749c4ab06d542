"""Training of draft heads on text that the target itself wrote (self-distillation)."""

from entmtp.train.config import DataConfig, HeadsRecipe, TrainConfig
from entmtp.train.progress import TrainEvent
from entmtp.train.run import TrainedHeads, train_heads, write_answers

__all__ = [
    "DataConfig",
    "HeadsRecipe",
    "TrainConfig",
    "TrainEvent",
    "TrainedHeads",
    "train_heads",
    "write_answers",
]
