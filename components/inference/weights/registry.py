"""What a name in `machine.weight_transfer` stands for: on the pool's side, and on the trainer's.

`adapter` is not one of them: it is what moves where `model.lora.served_as` says so.
"""

from armature.components.registry import Registry

WEIGHT_TRANSFERS = Registry(
    "weight transfer",
    "armature.weight_transfers",
    {
        "file": "armature.components.inference.weights.file:FileTransfer",
        "delta": "armature.components.inference.weights.delta:DeltaTransfer",
        "nccl": "armature.components.inference.weights.device:DeviceTransfer",
        "ipc": "armature.components.inference.weights.device:DeviceTransfer",
        "adapter": "armature.components.inference.weights.adapter:AdapterTransfer",
    },
)

WEIGHT_SENDERS = Registry(
    "weight sender",
    "armature.weight_senders",
    {
        "nccl": "armature.components.inference.weights.nccl:NcclSender",
        "ipc": "armature.components.inference.weights.ipc:IpcSender",
    },
)
