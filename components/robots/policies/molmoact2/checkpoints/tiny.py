"""Make a complete policy with random weights in the released layout, small enough for a CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from armature.components.families.tiny import chatml
from armature.components.models.tiny.tokenizer import BYTES, REPEATS, train_bpe
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import save_policy
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.action_tokens import SPECIAL_TOKENS, ActionTokens
from armature.components.robots.policies.molmoact2.processing.batch import Floats
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from armature.components.robots.policies.molmoact2.processing.processor import instruction
from armature.components.robots.policies.settings import RobotPolicySettings, TinyPolicySettings

PATCH, POOL = 14, 2
STATE_TOKENS = 256
EXTRA_EMBEDDINGS = 16  # rows for the tokens of images and some unused ones, as in released checkpoints
MERGES = 1000  # limit of BPE merges; a small corpus gives fewer
FAST_SCALE, FAST_CHUNKS, FAST_DIMENSIONS = 10.0, 200, 7
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IMAGE_TOKENS = (
    *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
    *("<frame_start>", "<frame_end>", "<|video|>"),
)
TOKEN_FIELDS = {field: token for token, field in SPECIAL_TOKENS.values()} | {
    "low_res_image_start_token_id": "<low_res_im_start>",
    "image_low_res_id": "<im_low>",
    "frame_start_token_id": "<frame_start>",
    "frame_end_token_id": "<frame_end>",
    "action_output_token_id": "<action_output>",
}
"""Token by field of config.json. The field holds the id of this token."""


def make_tiny_policy(folder: Path, settings: RobotPolicySettings) -> Path:
    """Write a checkpoint with random weights of the sizes `settings.tiny` to `folder`.

    It has no statistics of a robot until it is trained. The same settings give the same bytes on the same kind of CPU.
    """
    assert settings.tiny is not None
    sizes = settings.tiny
    tokenizer = _tokenizer(sizes)
    config = _config(sizes, tokenizer)
    layout = ImageLayout(sizes.image_side, PATCH, POOL, columns=False)
    chunks = _smooth_chunks(sizes.seed, sizes.max_action_horizon)
    tokens = ActionTokens.fit(chunks, sizes.action_tokens, FAST_SCALE)
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        tokenizer.save_pretrained(files)
        (files / "processor_config.json").write_text(json.dumps(layout.processor_config(), indent=2) + "\n")
        generation = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (files / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        parts = PolicyParts(config, tokenizer, settings, None, None, tokens, layout, files)
        return save_policy(folder, parts, _model(config, sizes).state_dict())


def tiny_config(sizes: TinyPolicySettings) -> MolmoAct2Config:
    """Return the configuration of the checkpoint that `make_tiny_policy` would write."""
    return _config(sizes, _tokenizer(sizes))


def _tokenizer(sizes: TinyPolicySettings) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that splits text like the released one.

    Tokens have the released order: text, setup, control, state, action, and last images, because the output head has
    no rows for image tokens.
    """
    texts = [*_texts(sizes)] * REPEATS
    model = train_bpe(len(MARKERS) + BYTES + MERGES, MARKERS, texts, Qwen2Tokenizer().backend_tokenizer)
    words = (
        *("<setup_start>", "<setup_end>", "<control_start>", "<control_end>", "<state_start>", "<state_end>"),
        *(f"<state_{number}>" for number in range(STATE_TOKENS)),
        *("<action_output>", "<action_start>", "<action_end>"),
        *(f"<action_{number}>" for number in range(sizes.action_tokens)),
    )
    model.add_special_tokens([AddedToken(word, normalized=False) for word in (*words, *IMAGE_TOKENS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=MARKERS[0],
        eos_token=MARKERS[2],
        bos_token=MARKERS[2],
        clean_up_tokenization_spaces=False,
        model_max_length=sizes.max_positions,
        padding_side="right",
    )
    tokenizer.chat_template = chatml("<|image|>")
    return tokenizer


def _texts(sizes: TinyPolicySettings) -> tuple[str, ...]:
    """Return the texts to train the tokenizer on: the corpus and the fixed words of the prompt.

    The tokenizer then needs few tokens for them.
    """
    prompt = "".join(instruction("", "", ""))
    for marker in (*MARKERS, "<action_output>"):
        prompt = prompt.replace(marker, "")
    return (*sizes.corpus, prompt, "Image 1 Image 2 Image 3")


def _config(sizes: TinyPolicySettings, tokenizer: PreTrainedTokenizerFast) -> MolmoAct2Config:
    """Return a tiny policy's configuration, with the same fields as a released checkpoint's config.json."""
    vision = {
        "hidden_size": sizes.vision_hidden_size,
        "num_attention_heads": sizes.vision_heads,
        "num_key_value_heads": sizes.vision_heads,
        "head_dim": sizes.vision_hidden_size // sizes.vision_heads,
        "initializer_range": sizes.vision_initializer_range,
    }
    patches = sizes.image_side // PATCH
    fields = {
        "architectures": ["MolmoAct2ForConditionalGeneration"],
        "model_type": "molmoact2",
        "dtype": "float32",
        "vit_config": vision
        | sizes.vision_config
        | {
            "image_default_input_size": [sizes.image_side, sizes.image_side],
            "image_patch_size": PATCH,
            "image_num_pos": patches * patches,
        },
        "adapter_config": vision
        | {
            "vit_layers": [-1, -sizes.vision_layers],
            "pooling_attention_mask": True,
            "intermediate_size": sizes.intermediate_size,
            "text_hidden_size": sizes.hidden_size,
        },
        "text_config": {
            **sizes.text_config,
            "vocab_size": len(tokenizer) - len(IMAGE_TOKENS),
            "additional_vocab_size": EXTRA_EMBEDDINGS,
            "qkv_bias": False,
            "use_qk_norm": True,
            "qk_norm_type": "qwen3",
            "max_position_embeddings": sizes.max_positions,
            "rope_theta": 5_000_000.0,
            "initializer_range": sizes.initializer_range,
        },
        "action_expert_config": {
            "hidden_size": sizes.expert_hidden_size,
            "num_layers": sizes.layers,
            "num_heads": sizes.expert_heads,
            "mlp_ratio": sizes.expert_mlp_ratio,
            "ffn_multiple_of": 1,
            "timestep_embed_dim": sizes.time_embedding,
        },
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in TOKEN_FIELDS.items()},
        "num_state_tokens": STATE_TOKENS,
        "num_action_tokens": sizes.action_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_action_dim": sizes.max_action_dim,
        "max_action_horizon": sizes.max_action_horizon,
        "n_obs_steps": 1,
        "action_mode": "both",
        "state_format": "discrete",
        "flow_matching_num_steps": 10,
        "flow_matching_cutoff": 1.0,
        "flow_matching_time_offset": 0.001,
        "flow_matching_time_scale": 0.999,
        "flow_matching_beta_alpha": 1.0,
        "flow_matching_beta_beta": 1.5,
        "mask_action_dim_padding": True,
        "add_setup_tokens": True,
        "add_control_tokens": True,
        "norm_stats_filename": "norm_stats.json",
    }
    return MolmoAct2Config.from_dict(fields, "policy.tiny")


def _model(config: MolmoAct2Config, sizes: TinyPolicySettings) -> MolmoAct2:
    """Return a model with random weights.

    In the VLM, norm weights are 1, biases are 0, and other weights are normally distributed. For the action expert see
    `ActionExpert.initialize`.
    """
    generator = torch.Generator().manual_seed(sizes.seed)
    model = MolmoAct2(config)
    with torch.no_grad():
        for name, parameter in model.vlm.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                vision = name.startswith(("model.vision_tower.", "model.multi_modal_projector."))
                std = sizes.vision_initializer_range if vision else sizes.initializer_range
                nn.init.normal_(parameter, std=std, generator=generator)
    model.action_expert.initialize(generator)
    return model


def _smooth_chunks(seed: int, horizon: int) -> Iterator[Floats]:
    """Yield chunks (horizon, FAST_DIMENSIONS) of slow waves in [-1, 1], which resemble a robot's actions."""
    draw = np.random.default_rng(seed)
    time = np.linspace(0.0, 1.0, horizon)[:, None]
    for _ in range(FAST_CHUNKS):
        waves = [draw.normal(size=FAST_DIMENSIONS) / (1 + k) * np.cos(np.pi * k * time) for k in range(4)]
        yield np.clip(sum(waves), -1.0, 1.0).astype(np.float32)
