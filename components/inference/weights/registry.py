"""The ways that a name in `machine.weight_transfer` stands for."""

from components.registry import Registry

WEIGHT_TRANSFERS = Registry(
    "weight transfer",
    "armature.weight_transfers",
    {
        "file": "components.inference.weights.file:FileTransfer",
        "nccl": "components.inference.weights.device:DeviceTransfer",
        "ipc": "components.inference.weights.device:DeviceTransfer",
    },
)
