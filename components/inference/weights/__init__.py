"""Transfers of new weights to servers: through a folder, or from the trainer's GPUs."""

from armature.components.inference.weights.pool import (
    WEIGHT_SENDERS,
    WEIGHT_TRANSFERS,
    Publish,
    WeightSender,
    WeightTransfer,
)

__all__ = ["WEIGHT_SENDERS", "WEIGHT_TRANSFERS", "Publish", "WeightSender", "WeightTransfer"]
