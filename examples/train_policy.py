"""A robot policy on a page: a tiny MolmoAct2 learns from a LeRobot dataset to move an arm to where it sees a block.

Read the dataset, compute its statistics, make the model, train by flow matching, and measure on held-out episodes how
far the predicted actions are from the demonstrated ones. `armature run train-vla/tiny` is the same with resume, several
ranks, tracking, and an evaluation in LIBERO. Two cores and no GPU are enough: `python examples/train_policy.py`, a
minute; `python examples/train_policy.py path/to/dataset` trains on yours (LeRobot v3.0, in a folder).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from armature.components.contracts.machine import Machine
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.lerobot.writer import LayoutSettings, create_dataset
from armature.components.robots.datasets.measure import measure_dataset, overall, plan
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.quantiles import document
from armature.components.robots.datasets.settings import ALONE, QuantileStatsSettings
from armature.components.robots.datasets.source import ACTION, STATE, DatasetSource, split
from armature.components.robots.imitation.data import Encoder, UpdateDataset
from armature.components.robots.imitation.heldout import HeldoutEvaluator, evenly_spread
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.imitation.robots import robots_of
from armature.components.robots.imitation.settings import HeldoutSettings, LearningRates, VLATrainerSettings
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_model, save_policy
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.robots.policies.settings import RobotPolicySettings, TinyPolicySettings

CAMERA, SIDE, TASK = "observation.images.front", 42, "move the arm to the block"
POLICY = RobotPolicySettings(
    tiny=TinyPolicySettings(image_side=SIDE, initializer_range=0.05, vision_initializer_range=0.05, corpus=(TASK,)),
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
    learning_rates=LearningRates(vlm=1e-3, vit=1e-3, connector=1e-3, action_expert=1e-3),
    warmup_steps=15,
    heldout=HeldoutSettings(fraction=0.1, frames=64),
)


def record(root: Path, episodes: int) -> None:
    """Demonstrations in which the arm begins in the middle and moves to a corner, where the camera sees a block."""
    features = {
        STATE: Feature(dtype="float32", shape=(2,), names=["x", "y"]),
        ACTION: Feature(dtype="float32", shape=(2,), names=["dx", "dy"]),
        CAMERA: Feature(dtype="image", shape=(SIDE, SIDE, 3), names=["height", "width", "channel"]),
    }
    random = np.random.default_rng(0)
    with create_dataset(root, fps=10.0, robot_type="arm", features=features, layout=LayoutSettings()) as writer:
        for _ in range(episodes):
            corner = random.choice([-1, 1], 2)
            actions = (0.1 * corner + random.normal(0, 0.01, (10, 2))).astype(np.float32)
            image = np.zeros((10, SIDE, SIDE, 3), np.uint8)
            x, y = SIDE // 4 * (corner + 1)
            image[:, y : y + SIDE // 2, x : x + SIDE // 2] = 255
            frames = {STATE: np.cumsum(actions, axis=0) - actions, ACTION: actions, CAMERA: image}
            writer.add_episode(frames, TASK)


def train(work: Path, folder: Path, settings: RobotPolicySettings, training: VLATrainerSettings) -> dict[str, float]:
    """Writes the policy to `work` / checkpoint; what it does on held-out episodes."""
    # The dataset, and its statistics: exact quantiles of states and actions, by which both are normalized.
    dataset = open_dataset(folder)
    cameras = {name: name for name, feature in dataset.info.features.items() if feature.is_visual}
    source = DatasetSource(dataset, ALONE, 1.0, None, STATE, ACTION, cameras, tuple(range(len(dataset.episodes))))
    units = plan(dataset, QuantileStatsSettings(features=(STATE, ACTION)), source.episodes)
    measured = measure_dataset(dataset, units, Machine(), progress=lambda done: None)
    statistics = {ALONE: document(overall(dataset, measured, threads=1))}

    # The model: random weights in the released layout, and the processor that turns a frame into its tokens.
    start = make_tiny_policy(work / "policy", settings)
    robots = robots_of(start, settings, [source], statistics)
    parts = robots.saved()
    encoder = Encoder(robots.processors(), parts.config, settings, training)
    model = load_model(start, parts)
    prepare(model, training, settings.semantics)  # freezes what is not trained; adds adapters in the modes with LoRA

    # The data: samples of the training episodes in an endless, seeded order; some frames of the held-out ones.
    assert training.heldout is not None
    trained, kept = split([source], training.heldout.fraction, training.seed)
    updates = UpdateDataset(Mixture(trained, settings.chunk_size, training.seed), encoder, rank=0, size=1)
    frames = evenly_spread(Mixture(kept, settings.chunk_size, training.seed), training.heldout.frames)
    evaluator = HeldoutEvaluator(frames, encoder, robots.measured, {ALONE: robots.parts[ALONE].settings})

    # The steps: noise is mixed into the actions, and the action expert learns the way back.
    learner = PolicyLearner(model, training, LossPlan.of(settings))
    for step in (bar := tqdm(range(1, training.max_steps + 1), desc="Training")):
        report = learner.step(updates[step])
        bar.set_postfix(loss=f"{report['loss']:.4g}", grad=f"{report['grad_norm']:.3g}")
    save_policy(work / "checkpoint", parts, learner.model.state_dict())
    return evaluator.measure(learner)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="train-policy-") as folder:
        dataset = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "dataset"
        if len(sys.argv) == 1:
            record(dataset, episodes=100)
        found = train(Path(folder), dataset, POLICY, TRAINING)
    error, constant = found["heldout/action_error"], found["heldout/mean_action_error"]
    print(f"action error {error:.3f} standard deviations; always the mean action: {constant:.3f}")
