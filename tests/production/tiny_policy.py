"""A recipe of a training that takes two nodes half a minute."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

TRAINING = """\
flow = "train-vla"
description = "A tiny policy, trained on two nodes."
dataset.path = "data"

[policy]
setup_type = "an arm"
control_mode = "velocities"
chunk_size = 3
n_action_steps = 3
dtype = "float32"

[policy.tiny]
hidden_size = 32
intermediate_size = 48
heads = 2
vision_hidden_size = 16
vision_intermediate_size = 24
vision_heads = 2
image_side = 28
expert_hidden_size = 32
expert_heads = 2
corpus = ["move the arm to the block", "close the gripper now", "an arm", "velocities"]

[training]
freeze_embedding = false
learning_rates = { vlm = 1e-3, vit = 1e-3, connector = 1e-3, action_expert = 1e-3 }
max_steps = 120
batch_size = 4
micro_batch_size = 2
save_every = 10
heldout = { fraction = 0.25, frames = 4, every = 120 }

[machine]
trainer_nodes = 2
threads = 1
loader_workers = 0
"""


def steps_done(store: Path) -> int:
    """Of the training that runs."""
    histories = list(store.glob("workspaces/train-vla-*/history.jsonl"))
    return len(histories[0].read_text().splitlines()) if histories else 0


def weights(store: Path) -> str:
    """The digest of what was trained, which is then forgotten."""
    (file,) = store.glob("train-vla/*/checkpoint/model.safetensors")
    digest = sha256(file.read_bytes()).hexdigest()
    for made in (store / "train-vla", *store.glob("workspaces/train-vla-*")):
        shutil.rmtree(made)
    return digest
