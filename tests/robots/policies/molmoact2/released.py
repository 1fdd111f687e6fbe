"""Checkpoints written from the description of the file format, without the project's readers and writers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from armature.components.contracts.robots import PreviousActions, RobotObservation
from tests.robots.policies.plain import policy_settings

HIDDEN, HEADS, KEY_HEADS, HEAD, LAYERS, MLP = 16, 4, 2, 6, 2, 20
VISION, VISION_MLP, BUILT, DECLARED, SIDE = 12, 14, 3, 4, 28
PROJECTOR, EXPERT, EXPERT_MLP, TIME, DIMENSIONS, HORIZON = 18, 8, 32, 6, 9, 5
STATES, ACTIONS, EXTRA = 256, 128, 16
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    *("<setup_start>", "<setup_end>", "<control_start>", "<control_end>", "<state_start>", "<state_end>"),
    *(f"<state_{number}>" for number in range(STATES)),
    *("<action_output>", "<action_start>", "<action_end>"),
    *(f"<action_{number}>" for number in range(ACTIONS)),
)
IMAGES = (
    *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
    *("<frame_start>", "<frame_end>"),
)
TOKENS = {
    token: number
    for number, token in enumerate((*MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *ADDED, *IMAGES))
}
VOCABULARY = TOKENS["<im_start>"]
CAMERAS = ("observation.images.front", "observation.images.wrist")


def config() -> dict[str, Any]:
    """Return config.json as transformers writes it: only fields that differ from the classes' defaults."""
    vision = {"hidden_size": VISION, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6}
    image = {"intermediate_size": VISION_MLP, "num_hidden_layers": DECLARED, "image_num_pos": 4}
    adapter = {"vit_layers": [-2, -4], "intermediate_size": PROJECTOR, "text_hidden_size": HIDDEN}
    text = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD}
    text |= {"vocab_size": VOCABULARY, "additional_vocab_size": EXTRA, "num_hidden_layers": LAYERS}
    text |= {"intermediate_size": MLP, "rope_theta": 5e6, "use_qk_norm": True, "qk_norm_type": "qwen3"}
    expert = {"hidden_size": EXPERT, "num_layers": LAYERS, "num_heads": 2, "mlp_ratio": 4.0, "ffn_multiple_of": 16}
    ids = {
        "image_start_token_id": "<im_start>",
        "image_end_token_id": "<im_end>",
        "image_patch_id": "<im_patch>",
        "image_col_id": "<im_col>",
        "action_start_token_id": "<action_start>",
        "action_end_token_id": "<action_end>",
        "action_token_start_id": "<action_0>",
        "state_start_token_id": "<state_start>",
        "state_end_token_id": "<state_end>",
        "state_token_start_id": "<state_0>",
        "bos_token_id": "<|im_end|>",
        "eos_token_id": "<|im_end|>",
        "pad_token_id": "<|endoftext|>",
    }
    sizes = {"num_action_tokens": ACTIONS, "num_state_tokens": STATES, "num_depth_codes": 100, "n_obs_steps": 1}
    sizes |= {"max_action_dim": DIMENSIONS, "max_action_horizon": HORIZON}
    return {
        "architectures": ["MolmoAct2ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_molmoact2.MolmoAct2Config"},
        "model_type": "molmoact2",
        "vit_config": vision | image | {"image_default_input_size": [SIDE, SIDE]},
        "adapter_config": vision | adapter | {"pooling_attention_mask": True},
        "text_config": text | {"qkv_bias": False},
        "action_expert_config": expert | {"timestep_embed_dim": TIME},
        **{name: TOKENS[token] for name, token in ids.items()},
        **sizes,
        "a_field_of_tomorrow": {"deep": [1, None]},
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the checkpoint, except the rotary frequencies."""
    queries, keys = HEADS * HEAD, KEY_HEADS * HEAD
    text, vit = "model.transformer", "model.vision_backbone.image_vit"
    tensors: dict[str, tuple[int, ...]] = {
        f"{text}.wte.embedding": (VOCABULARY, HIDDEN),
        f"{text}.wte.new_embedding": (EXTRA, HIDDEN),
        f"{text}.ln_f.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        f"{vit}.positional_embedding": (4, VISION),
        f"{vit}.patch_embedding.weight": (VISION, 14 * 14 * 3),
        f"{vit}.patch_embedding.bias": (VISION,),
    }
    for layer in range(LAYERS):
        block = f"{text}.blocks.{layer}"
        tensors |= {f"{block}.{norm}.weight": (HIDDEN,) for norm in ("attn_norm", "ff_norm")}
        tensors |= {f"{block}.self_attn.{norm}.weight": (HEAD,) for norm in ("q_norm", "k_norm")}
        tensors |= {
            f"{block}.self_attn.att_proj.weight": (queries + 2 * keys, HIDDEN),
            f"{block}.self_attn.attn_out.weight": (HIDDEN, queries),
            f"{block}.mlp.ff_proj.weight": (2 * MLP, HIDDEN),
            f"{block}.mlp.ff_out.weight": (HIDDEN, MLP),
        }
    linears = {f"attention.{one}": (VISION, VISION) for one in ("wq", "wk", "wv", "wo")}
    linears |= {"feed_forward.w1": (VISION_MLP, VISION), "feed_forward.w2": (VISION, VISION_MLP)}
    for layer in range(BUILT):
        block = f"{vit}.transformer.resblocks.{layer}"
        for name, shape in linears.items():
            tensors |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
        for norm in ("attention_norm", "ffn_norm"):
            tensors |= {f"{block}.{norm}.weight": (VISION,), f"{block}.{norm}.bias": (VISION,)}
    for name, width in (("wq", 2 * VISION), ("wk", 2 * VISION), ("wv", 2 * VISION), ("wo", VISION)):
        place = f"model.vision_backbone.image_pooling_2d.{name}"
        tensors |= {f"{place}.weight": (VISION, width), f"{place}.bias": (VISION,)}
    for name, shape in (("w1", (PROJECTOR, VISION)), ("w2", (HIDDEN, PROJECTOR)), ("w3", (PROJECTOR, VISION))):
        tensors[f"model.vision_backbone.image_projector.{name}.weight"] = shape
    return tensors | _expert_shapes(keys)


def _expert_shapes(context: int) -> dict[str, tuple[int, ...]]:
    expert = "model.action_expert"
    linears: dict[str, tuple[int, ...]] = {
        "time_embed.1": (EXPERT, TIME),
        "time_embed.3": (EXPERT, EXPERT),
        "action_embed": (EXPERT, DIMENSIONS),
        "final_layer.modulation.linear": (2 * EXPERT, EXPERT),
        "final_layer.linear": (DIMENSIONS, EXPERT),
    }
    for layer in range(LAYERS):
        linears |= {
            f"blocks.{layer}.self_attn.qkv": (3 * EXPERT, EXPERT),
            f"blocks.{layer}.self_attn.out_proj": (EXPERT, EXPERT),
            f"blocks.{layer}.cross_attn.q_proj": (EXPERT, EXPERT),
            f"blocks.{layer}.cross_attn.out_proj": (EXPERT, EXPERT),
            f"blocks.{layer}.mlp.up_proj": (EXPERT_MLP, EXPERT),
            f"blocks.{layer}.mlp.gate_proj": (EXPERT_MLP, EXPERT),
            f"blocks.{layer}.mlp.down_proj": (EXPERT, EXPERT_MLP),
            f"blocks.{layer}.modulation.linear": (9 * EXPERT, EXPERT),
        }
    tensors = {f"{expert}.context_{one}_proj.weight": (EXPERT, context) for one in "kv"}
    for name, shape in linears.items():
        tensors |= {f"{expert}.{name}.weight": shape, f"{expert}.{name}.bias": shape[:1]}
    return tensors


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Return random float32 tensors, and the rotary frequencies of the text layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes().items()}
    exponents = torch.arange(0, HEAD, 2, dtype=torch.int64).float() / HEAD
    return tensors | {"model.transformer.rotary_emb.inv_freq": 1.0 / (5e6**exponents)}


def statistics(dimensions: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    low, middle, high = -1.5 + rng.random(dimensions), 0.1 * rng.random(dimensions), 1 + rng.random(dimensions)
    rows = {"min": low - 0.5, "q01": low, "q10": low / 2, "mean": middle, "std": high, "q90": high / 2, "q99": high}
    values = {name: row.tolist() for name, row in rows.items()} | {"max": (high + 0.5).tolist()}
    names = [f"joint_{number}" for number in range(dimensions)]
    return values | {"count": 1000, "names": names, "mask": [True] * dimensions}


def norm_stats() -> dict[str, Any]:
    entry = {
        "action_key": "action",
        "state_keys": ["observation.state"],
        "camera_keys": list(CAMERAS),
        "normalize_gripper": True,
        "action_horizon": 4,
        "n_action_steps": 3,
        "setup_type": "single arm in a kitchen",
        "control_mode": "delta end-effector pose",
        "action_stats": statistics(7, seed=1),
        "state_stats": statistics(8, seed=2),
    }
    tags = {"kitchen": entry, "garden": entry | {"camera_keys": [], "setup_type": "a mower"}}
    return {"format": "molmoact2_norm_stats.v1", "norm_mode": "q01_q99", "metadata_by_tag": tags}


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and without merges. Special tokens have the ids in TOKENS."""
    ordinary = {token: number for token, number in TOKENS.items() if number < len(MARKERS) + 256}
    made = Tokenizer(models.BPE(vocab=ordinary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in (*MARKERS, *ADDED, *IMAGES)])
    assert all(made.token_to_id(token) == number for token, number in TOKENS.items())
    return made


def write_files(folder: Path) -> None:
    """Write all files except config.json and the weights."""
    tokenizer().save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "bos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    image = {"size": {"height": SIDE, "width": SIDE}, "patch_size": 14, "pooling_size": [2, 2], "crop_mode": "resize"}
    image |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    write(folder / "tokenizer_config.json", special | {"tokenizer_class": "Qwen2Tokenizer"})
    write(folder / "processor_config.json", {"image_processor": image, "use_single_crop_col_tokens": False})
    write(folder / "generation_config.json", {"eos_token_id": TOKENS["<|im_end|>"]})
    write(folder / "norm_stats.json", norm_stats())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_molmoact2.py").write_text("raise SystemExit('code of a checkpoint was run')")


def write_released(folder: Path, seed: int = 0, shards: int = 1) -> Path:
    """Write a checkpoint in the released layout; two or more shards get an index."""
    folder.mkdir(parents=True)
    write(folder / "config.json", config())
    write_files(folder)
    tensors = weights(seed)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    places = {name: files[number % shards] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file, {"format": "pt"})
    write(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": places})
    return folder


def write(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document))


def observe(number: int, previous: PreviousActions | None = None) -> RobotObservation:
    """Return an observation with random images and a random state. Its task is one of three."""
    rng = np.random.default_rng(number)
    images = {camera: rng.integers(0, 256, (40, 50, 3), np.uint8) for camera in CAMERAS}
    tasks = ("Put the bowl away.", "Open the top drawer of the cabinet", "wait")
    return RobotObservation(images, rng.uniform(-1, 1, 8).astype(np.float32), tasks[number % 3], previous)


SETTINGS = policy_settings(
    checkpoint_path="given/elsewhere",
    image_attention_at_inference="bidirectional",
    chunk_size=HORIZON,
    n_action_steps=HORIZON,
    normalize_gripper=True,
)
KITCHEN = SETTINGS.model_copy(update={"norm_tag": "kitchen"})
