"""Updates and actions of MolmoAct2 by LeRobot's own code, for tests/robots/imitation/test_lerobot_head.py.

Usage: head_side.py FOLDER, with a checkpoint, its action tokenizer, examples (examples.npz) and cases (cases.json).
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy
from lerobot.policies.molmoact2.processor_molmoact2 import make_molmoact2_pre_post_processors

FOLDER = Path(sys.argv[1])
EXAMPLES = dict(np.load(FOLDER / "examples.npz"))
CAMERAS = [str(name) for name in EXAMPLES["cameras"]]
DRAWS = {name: torch.from_numpy(EXAMPLES[name]) for name in ("timesteps", "noise")}
GROUPS = ("vlm", "vit", "connector", "action_expert")
RATES = ("optimizer_lr", "optimizer_vit_lr", "optimizer_connector_lr", "optimizer_action_expert_lr")


def config_of(case: dict) -> MolmoAct2Config:
    seen = {name: PolicyFeature(FeatureType.VISUAL, (3, *EXAMPLES[name].shape[1:3])) for name in CAMERAS}
    state = PolicyFeature(FeatureType.STATE, EXAMPLES["state"].shape[1:])
    return MolmoAct2Config(
        checkpoint_path=str(FOLDER),
        device="cpu",
        discrete_action_tokenizer=str(FOLDER / "action_tokenizer"),
        inference_action_mode=None,
        input_features=seen | {"observation.state": state},
        output_features={"action": PolicyFeature(FeatureType.ACTION, EXAMPLES["action"].shape[2:])},
        llm_residual_dropout=0.0,  # its random numbers are not ours
        num_flow_timesteps=DRAWS["timesteps"].shape[1],
        **case,
    )


def observed(rows: slice | int) -> dict:
    images = {name: torch.from_numpy(EXAMPLES[name][rows]).movedim(-1, -3) for name in CAMERAS}
    return images | {"observation.state": torch.from_numpy(EXAMPLES["state"][rows])}


def lengths(groups: dict) -> dict:
    gradients = {name: [p.grad for p in group["params"] if p.grad is not None] for name, group in groups.items()}
    return {name: torch.nn.utils.get_total_norm(each).item() for name, each in gradients.items() if each}


def two_updates(case: dict) -> tuple[dict, dict]:
    """Return what is recorded of them, and how far they moved the weights of each group."""
    config = config_of(case)
    policy = MolmoAct2Policy(config).train()
    preprocess, _ = make_molmoact2_pre_post_processors(config)
    targets = {name: torch.from_numpy(EXAMPLES[name]) for name in ("action", "action_is_pad")}
    inputs = preprocess(observed(slice(3)) | targets | {"task": [str(task) for task in EXAMPLES["task"]]})
    flow_tensors = policy._prepare_flow_matching_tensors
    policy._prepare_flow_matching_tensors = lambda **arguments: flow_tensors(**arguments | DRAWS)
    optimizer = config.get_optimizer_preset().build(policy.get_optim_params())
    schedule = config.get_scheduler_preset().build(optimizer, 2)
    groups = dict(zip(GROUPS[-len(optimizer.param_groups) :], optimizer.param_groups, strict=True))
    weights = sorted((name.removeprefix("model."), p) for name, p in policy.named_parameters())
    before = {name: p.detach().float().clone() for name, p in weights}
    record: dict = {"loss": [], "norms": [], "clipped": []}
    for _ in range(2):
        loss, _ = policy(inputs)
        loss.backward()
        record["loss"].append(loss.item())
        record["norms"].append(lengths(groups))
        optimizer.step()
        record["clipped"].append(lengths(groups))
        optimizer.zero_grad()
        schedule.step()
    rest = {p: state["compensation"] for p, state in optimizer.state.items() if "compensation" in state}
    moved = {p: p.detach().float() + rest.get(p, 0.0) - before[name] for name, p in weights}
    if config.dtype == "float32":
        record["moved"] = [float(f"{projection(moved[p]):.9g}") for _, p in weights]
    else:
        record["float32"] = [int(p.dtype == torch.float32) for _, p in weights]
    return record, {name: torch.cat([moved[p].flatten() for p in each["params"]]) for name, each in groups.items()}


def projection(moved: torch.Tensor) -> float:
    """Return a number that changes with every element."""
    direction = torch.arange(moved.numel()).double().cos()
    return (moved.flatten().double() @ direction / direction.norm()).item()


def actions(case: dict, saved_mode: str | None) -> list:
    """Return actions of the first example; `saved_mode` is the action_mode in the checkpoint, if LeRobot saved it."""
    config = config_of(case)
    config.inference_action_mode = "continuous"
    policy = MolmoAct2Policy(config).eval()
    policy._checkpoint_action_mode = saved_mode
    preprocess, postprocess = make_molmoact2_pre_post_processors(config)
    inputs = preprocess(observed(0) | {"task": str(EXAMPLES["task"][0])})
    return postprocess(policy.predict_action_chunk(inputs, generator=torch.Generator().manual_seed(11)))[0].tolist()


def learning_rates(config: MolmoAct2Config) -> dict:
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "lr": getattr(config, name)} for name in RATES])
    (factor, *_) = config.get_scheduler_preset().build(optimizer, 10_000).lr_lambdas
    updates = (1, 100, 199, 200, 201, 6000, 10_000, 23_999, 24_000, 30_000)
    return {k: [getattr(config, name) * factor(k - 1) for name in RATES] for k in updates}


if __name__ == "__main__":
    asked = json.loads((FOLDER / "cases.json").read_text())
    cases, moved = {}, {}
    for name, case in asked.items():
        cases[name], moved[name] = two_updates(case)
    pairs = zip(moved["both"].items(), moved["rounded"].values(), strict=True)
    facts = {
        "distances": {name: ((rounded - exact).norm() / exact.norm()).item() for (name, exact), rounded in pairs},
        "rates": learning_rates(MolmoAct2Config()),
        "actions": {mode or "released": actions(asked["continuous"], mode) for mode in ("continuous", None)},
        "cases": cases,
    }
    print(json.dumps(facts))
