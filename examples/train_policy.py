"""A robot policy on a page: a tiny MolmoAct2 learns from a LeRobot dataset to move an arm to where it sees a block.

The script records demonstrations, computes their statistics, makes the model, trains it by flow matching, and measures
on held-out episodes how far predicted actions are from the demonstrated ones. Two cores and no GPU are enough:
`python examples/train_policy.py` takes a minute. `python examples/train_policy.py path/to/dataset` trains on your own
dataset (LeRobot v3.0, in a folder).

This script leaves out what `armature run train-vla/tiny` adds: resuming, several ranks, tracking and an evaluation in
LIBERO.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from armature import PolicyTrainer, RobotPolicySettings, VLATrainerSettings, create_dataset

STATE, ACTION, CAMERA = "observation.state", "action", "observation.images.front"
SIDE, TASK = 42, "move the arm to the block"
POLICY = RobotPolicySettings(
    tiny={"image_side": SIDE, "initializer_range": 0.05, "vision_initializer_range": 0.05, "corpus": [TASK]},
    chunk_size=4,
    n_action_steps=4,
    num_flow_timesteps=4,
    num_inference_steps=10,
    image_attention_at_inference="as_trained",
    llm_residual_dropout=0.0,
    dtype="float32",
)
TRAINING = VLATrainerSettings(
    max_steps=150,
    batch_size=32,
    micro_batch_size=32,
    freeze_embedding=False,  # random weights: all of them learn
    learning_rates={"vlm": 1e-3, "vit": 1e-3, "connector": 1e-3, "action_expert": 1e-3},
    warmup_steps=15,
    heldout={"fraction": 0.1, "frames": 64},
)


def record(root: Path, episodes: int) -> None:
    """Write demonstrations: the arm starts in the middle and moves to the corner where the camera sees a block."""
    features = {
        STATE: {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        ACTION: {"dtype": "float32", "shape": [2], "names": ["dx", "dy"]},
        CAMERA: {"dtype": "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channel"]},
    }
    random = np.random.default_rng(0)
    with create_dataset(root, fps=10.0, robot_type="arm", features=features) as writer:
        for _ in range(episodes):
            corner = random.choice([-1, 1], 2)
            actions = (0.1 * corner + random.normal(0, 0.01, (10, 2))).astype(np.float32)
            image = np.zeros((10, SIDE, SIDE, 3), np.uint8)
            x, y = SIDE // 4 * (corner + 1)
            image[:, y : y + SIDE // 2, x : x + SIDE // 2] = 255
            frames = {STATE: np.cumsum(actions, axis=0) - actions, ACTION: actions, CAMERA: image}
            writer.add_episode(frames, TASK)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="train-policy-") as folder:
        work = Path(folder)
        dataset = Path(sys.argv[1]) if len(sys.argv) > 1 else work / "dataset"
        if len(sys.argv) == 1:
            record(dataset, episodes=100)
        trainer = PolicyTrainer(dataset, POLICY, TRAINING, work)
        metrics = trainer.train()
        trainer.save(work / "checkpoint")
    error, constant = metrics["heldout/action_error"], metrics["heldout/mean_action_error"]
    print(f"action error {error:.3f} standard deviations; always the mean action: {constant:.3f}")


if __name__ == "__main__":
    main()
