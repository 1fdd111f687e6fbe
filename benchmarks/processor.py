"""Robot examples per second on one core: ours against the same steps by the usual libraries, with equal results."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.transforms import InterpolationMode, Resize

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.checkpoints.parts import load_parts
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
from armature.components.robots.policies.molmoact2.processing.batch import Floats, Ints
from armature.components.robots.policies.molmoact2.processing.processor import Processor, instruction, state_bins, wrap
from armature.components.robots.policies.norm_stats import FeatureNormStats, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings
from benchmarks.table import Row, alternate, seconds

EXAMPLES, ROUNDS = 20, 5
CAMERA, SIDE, CHUNK, ACTIONS, STATES = 256, 378, 10, 7, 8
CAMERAS = ("observation.images.image", "observation.images.wrist_image")
TASK, SETUP, CONTROL = "put the bowl on the plate", "single franka robotic arm in libero", "delta end-effector pose"

TINY = {
    "seed": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers": 2,
    "heads": 2,
    "key_value_heads": 1,
    "vision_hidden_size": 16,
    "vision_intermediate_size": 24,
    "vision_layers": 2,
    "vision_heads": 2,
    "expert_hidden_size": 32,
    "expert_heads": 2,
    "expert_mlp_ratio": 2.0,
    "time_embedding": 16,
    "image_side": SIDE,
    "max_action_dim": 32,
    "max_action_horizon": CHUNK,
    "max_positions": 2048,
    "action_tokens": 2048,
    "corpus": (TASK, SETUP, CONTROL),
    "initializer_range": 0.05,
    "vision_initializer_range": 0.05,
}
POLICY: dict[str, Any] = {
    "tiny": TINY,
    "semantics": "head",
    "image_attention_at_inference": "as_trained",
    "action_mode": "both",
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "setup_type": SETUP,
    "control_mode": CONTROL,
    "image_keys": CAMERAS,
    "normalize_language": True,
    "normalize_gripper": True,
    "add_setup_tokens": True,
    "add_control_tokens": True,
    "state_normalization": "quantiles",
    "action_normalization": "quantiles",
    "num_flow_timesteps": 8,
    "mask_action_dim_padding": True,
    "enable_knowledge_insulation": False,
    "softmax_auxiliary_loss_scale": 1e-4,
    "discrete_loss_token_weighting": "token",
    "llm_residual_dropout": 0.0,
    "dtype": "float32",
}


ROBOT = RobotMetadata(
    state_stats=FeatureNormStats(q01=(-1.0,) * STATES, q99=(1.0,) * STATES),
    action_stats=FeatureNormStats(q01=(-1.0,) * ACTIONS, q99=(1.0,) * ACTIONS),
)


def processor() -> Processor:
    """Return a processor with the released image size. Its tokenizer is small, which favors neither side."""
    settings = RobotPolicySettings(**POLICY)
    with tempfile.TemporaryDirectory() as folder:
        return load_parts(make_tiny_policy(Path(folder) / "policy", settings), settings, ROBOT).processor()


def frame(random: np.random.Generator) -> tuple[RobotObservation, Floats]:
    images = {name: random.integers(0, 256, (CAMERA, CAMERA, 3), dtype=np.uint8) for name in CAMERAS}
    state = random.uniform(-1, 1, STATES).astype(np.float32)
    steps = random.normal(size=(CHUNK, ACTIONS)).cumsum(0) * 0.05
    return RobotObservation(images, state, TASK), np.clip(steps, -1, 1).astype(np.float32)


def by_libraries(encoder: Processor, observation: RobotObservation, actions: Floats) -> tuple[Ints, Floats]:
    """Prepare inputs with the steps of the released code: the whole text is tokenized each time, torchvision resizes
    images, and numpy makes patches."""
    side, patch = encoder.layout.side, encoder.layout.patch
    rows = side // patch
    resize, patches = Resize([side, side], InterpolationMode.BILINEAR, antialias=False), []
    for name in CAMERAS:
        resized = resize(torch.from_numpy(observation.images[name]).permute(2, 0, 1)).permute(1, 2, 0).numpy()
        grid = resized.reshape(rows, patch, rows, patch, 3).transpose(0, 2, 1, 3, 4)
        patches.append(grid.reshape(rows * rows, patch * patch * 3))
    image = "<im_start>" + "<im_patch>" * len(encoder.layout.pooling) + "<im_end>"
    bins = state_bins(encoder.state.normalize(observation.state), encoder.config.num_state_tokens)
    before, after = instruction(TASK, wrap(SETUP, "setup", True), wrap(CONTROL, "control", True))
    state = "<state_start>" + "".join(f"<state_{one}>" for one in bins) + "<state_end>"
    assert encoder.action_tokens is not None
    output = "".join(f"<action_{one}>" for one in encoder.action_tokens.encode(encoder.action.normalize(actions)))
    images = "".join(f"Image {number + 1}{image}" for number in range(len(CAMERAS)))
    text = f"<|im_end|>{images}{before}{state}{after}<action_start>{output}<action_end><|im_end|>"
    return np.array(encoder.tokenizer(text, add_special_tokens=False)["input_ids"]), np.stack(patches)


def measure() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows(processor())
    finally:
        torch.set_num_threads(threads)


def _rows(encoder: Processor) -> list[Row]:
    random = np.random.default_rng(0)
    frames = [frame(random) for _ in range(EXAMPLES)]
    examples = [encoder.encode(*each) for each in frames]
    for example, each in zip(examples, frames, strict=True):
        ids, pixels = by_libraries(encoder, *each)
        assert np.array_equal(example.input_ids, ids), "not the same tokens"
        assert np.array_equal(example.pixel_values, pixels), "not the same pixels"
    encoded = alternate(
        ROUNDS,
        lambda: EXAMPLES / seconds(lambda: [encoder.encode(*each) for each in frames]),
        lambda: EXAMPLES / seconds(lambda: [by_libraries(encoder, *each) for each in frames]),
    )
    shape = f"two {CAMERA} x {CAMERA} images to {SIDE}, chunk {CHUNK} x {ACTIONS}, both action modes, one core"
    return [Row("encoding", encoded.ours, encoded.baseline, "libraries", "examples/s", "higher", shape, encoded.spread)]
