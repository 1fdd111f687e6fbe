"""How new weights reach the servers: through a folder, or from the trainer's GPUs."""

from armature.components.inference.weights.base import Publish, WeightSender, WeightTransfer
from armature.components.inference.weights.registry import WEIGHT_SENDERS, WEIGHT_TRANSFERS

__all__ = ["WEIGHT_SENDERS", "WEIGHT_TRANSFERS", "Publish", "WeightSender", "WeightTransfer"]
