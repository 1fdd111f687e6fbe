"""Run by a Python that has LeRobot 0.6.1: save a tiny policy with random weights, and act with it as LeRobot does.

A line on stdin says what to do: ["make", "act", "diffusion" or "smolvla", FOLDER, OBSERVATIONS, ANSWER], or ["train",
"expert" or "full", FOLDER, BATCH, ANSWER].
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

TINY = {
    "act": {
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 48,
        "n_encoder_layers": 1,
        "n_vae_encoder_layers": 1,
        "latent_dim": 8,
        "chunk_size": 6,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "n_obs_steps": 1,
        "pretrained_backbone_weights": None,
        "horizon": 8,
        "down_dims": (16, 32),
        "n_groups": 4,
        "kernel_size": 3,
        "spatial_softmax_num_keypoints": 4,
        "diffusion_step_embed_dim": 16,
        "num_train_timesteps": 4,
        "drop_n_last_frames": 4,
    },
    "smolvla": {
        "chunk_size": 6,
        "num_steps": 3,
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": (64, 64),
        "load_vlm_weights": False,
        "tokenizer_max_length": 16,
    },
}


def tiny_vlm(folder: Path) -> str:
    """Write a SmolVLM without weights that has a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    special = ["<pad>", "<eos>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words = {word: number for number, word in enumerate([*special, "\n", "put", "the", "bowl", "away", "open", "it"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"image_token": special[3], "fake_image_token": special[4], "global_image_token": special[5]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", extra_special_tokens=named
    )
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 16,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": len(words),
            "pad_token_id": 0,
        },
        scale_factor=2,
        image_token_id=3,
        pad_token_id=0,
    )
    config.save_pretrained(folder)
    parts = SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()
    SmolVLMProcessor(*parts, chat_template="").save_pretrained(folder)
    return str(folder)


def make(kind: str, folder: Path, observations: dict, answer: Path) -> None:
    cameras = [str(name) for name in observations["cameras"]]
    side = observations[cameras[0]].shape[1]
    states, actions = observations["state"].shape[1], int(observations.get("action_dimensions", 7))
    options = dict(TINY[kind])
    if kind == "smolvla":
        options["vlm_model_name"] = tiny_vlm(folder.parent / "vlm")
    config = make_policy_config(
        kind,
        device="cpu",
        n_action_steps=4,
        input_features={
            **{name: PolicyFeature(type=FeatureType.VISUAL, shape=(3, side, side)) for name in cameras},
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(states,)),
        },
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(actions,))},
        **options,
    )
    torch.manual_seed(0)
    policy = get_policy_class(kind)(config).eval()
    color = torch.full((3, 1, 1), 0.4)
    stats = {name: {"mean": color, "std": color / 2, "min": 0 * color, "max": 2 * color} for name in cameras}
    for name, size in (("observation.state", states), ("action", actions)):
        low, high = torch.linspace(-1.5, -0.5, size), torch.linspace(0.4, 1.2, size)
        stats[name] = {"mean": (low + high) / 2, "std": (high - low) / 4, "min": low, "max": high}
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    for part in (policy, before, after):
        part.save_pretrained(folder)
    chunks = []
    for row, seed in enumerate(observations["seeds"].tolist()):
        policy.reset()
        torch.manual_seed(seed)
        steps = []
        for _ in range(config.n_action_steps):
            frames = {name: torch.from_numpy(observations[name][row]).permute(2, 0, 1) for name in cameras}
            batch = {name: frame.contiguous().float() / 255 for name, frame in frames.items()}
            batch["observation.state"] = torch.from_numpy(observations["state"][row])
            with torch.no_grad():
                steps.append(after(policy.select_action(before({**batch, "task": str(observations["tasks"][row])}))))
        chunks.append(torch.cat(steps).numpy())
    np.save(answer, np.stack(chunks))


def train(mode: str, folder: Path, batch: dict, answer: Path) -> None:
    """Save the loss and the gradient norm of a SmolVLA, whose expert or all of which LeRobot trains."""
    config = PreTrainedConfig.from_pretrained(folder)
    config.train_expert_only = config.freeze_vision_encoder = mode == "expert"
    config.load_vlm_weights = False
    policy = get_policy_class("smolvla").from_pretrained(folder, config=config, strict=True).train()
    before, _ = make_pre_post_processors(config, pretrained_path=str(folder))
    tensors = {name: torch.from_numpy(value) for name, value in batch.items() if name != "tasks"}
    noise, time = tensors.pop("noise"), tensors.pop("time")
    for name in config.image_features:
        tensors[name] = tensors[name].permute(0, 3, 1, 2).contiguous().float() / 255
    inputs = before({**tensors, "task": [str(task) for task in batch["tasks"]]})
    loss, _ = policy.forward(inputs, noise=noise, time=time)
    loss.backward()
    norms = [each.grad.double().norm() for each in policy.parameters() if each.grad is not None]
    np.save(answer, np.array([loss.item(), torch.stack(norms).norm().item()]))


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the process that is compared: sums in another order have other last bits
    for line in sys.stdin:
        order, kind, folder, observations, answer = json.loads(line)
        {"make": make, "train": train}[order](kind, Path(folder), dict(np.load(observations)), Path(answer))
        print("done", flush=True)
