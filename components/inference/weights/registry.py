"""What a name in `machine.weight_transfer` stands for: on the pool's side, and on the trainer's.

`adapter` is not one of them: it is what moves where `model.lora.served_as` says so.
"""

from components.registry import Registry

WEIGHT_TRANSFERS = Registry(
    "weight transfer",
    "armature.weight_transfers",
    {
        "file": "components.inference.weights.file:FileTransfer",
        "delta": "components.inference.weights.delta:DeltaTransfer",
        "nccl": "components.inference.weights.device:DeviceTransfer",
        "ipc": "components.inference.weights.device:DeviceTransfer",
        "adapter": "components.inference.weights.adapter:AdapterTransfer",
    },
)

WEIGHT_SENDERS = Registry(
    "weight sender",
    "armature.weight_senders",
    {
        "nccl": "components.inference.weights.nccl:NcclSender",
        "ipc": "components.inference.weights.ipc:IpcSender",
    },
)
