"""Run by a Python that has lerobot[molmoact2] 0.6.1: what LeRobot itself makes of a checkpoint, and what it saves.

Lines on stdin say what to do:
["act", CHECKPOINT, OBSERVATION, ANSWER]                              LeRobot's answer to the observation
["create", RELEASED, OBSERVATION, ANSWER, SAVED, "lora" or "plain"]   the same of a policy that LeRobot saves
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy
from lerobot.policies.molmoact2.processor_molmoact2 import make_molmoact2_pre_post_processors

SEED = 11


def answer(policy, preprocess, postprocess, observation: dict) -> np.ndarray:
    batch = {"observation.state": torch.from_numpy(observation["state"]), "task": str(observation["task"])}
    for key in observation["cameras"]:
        batch[str(key)] = torch.from_numpy(observation[str(key)]).permute(2, 0, 1)
    inputs = preprocess(batch)
    chunk = policy.eval().predict_action_chunk(inputs, generator=torch.Generator().manual_seed(SEED))
    return postprocess(chunk).numpy()[0]


def create(released: Path, observation: dict, facts: dict, saved: Path, lora: bool):
    cameras = {str(key): PolicyFeature(type=FeatureType.VISUAL, shape=(3, 30, 40)) for key in observation["cameras"]}
    state = PolicyFeature(type=FeatureType.STATE, shape=(len(observation["state"]),))
    action = PolicyFeature(type=FeatureType.ACTION, shape=(facts["action_dimensions"],))
    config = MolmoAct2Config(
        checkpoint_path=str(released),
        device="cpu",
        action_mode="continuous",
        inference_action_mode="continuous",
        chunk_size=facts["chunk_size"],
        n_action_steps=facts["chunk_size"],
        setup_type="an arm",
        control_mode="joint pose",
        image_keys=list(cameras),
        model_dtype="float32",
        enable_lora_vlm=lora,
        lora_rank=4,
        lora_alpha=10,
        input_features=cameras | {"observation.state": state},
        output_features={"action": action},
        normalize_gripper=True,
        enable_inference_cuda_graph=False,
    )
    policy = MolmoAct2Policy(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=generator)
    stats = {
        key: {name: torch.tensor(row) for name, row in rows.items() if name != "names"}
        for key, rows in facts["statistics"].items()
    }
    pipelines = make_molmoact2_pre_post_processors(config, dataset_stats=stats)
    for one in (policy, *pipelines):
        one.save_pretrained(saved)
    return (policy, *pipelines)


def main(order: str, folder: str, file: str, target: str, *more: str) -> None:
    observation = dict(np.load(file))
    if order == "create":
        facts = json.loads(str(observation["facts"]))
        parts = create(Path(folder), observation, facts, Path(more[0]), lora=more[1] == "lora")
    else:
        policy = MolmoAct2Policy.from_pretrained(folder, strict=True)
        parts = (policy, *make_pre_post_processors(policy.config, pretrained_path=folder))
    np.save(target, answer(*parts, observation))


if __name__ == "__main__":
    for line in sys.stdin:
        main(*json.loads(line))
        print("done", flush=True)
