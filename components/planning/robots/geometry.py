"""Sizes of a MolmoAct2, without its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from armature.components.models.source import locate
from armature.components.policies.molmoact2.checkpoints.lerobot_layout import read_json
from armature.components.policies.molmoact2.checkpoints.parts import CONFIG
from armature.components.policies.molmoact2.checkpoints.tiny import tiny_config
from armature.components.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.policies.settings import RobotPolicySettings
from armature.components.policies.source import POLICY_WITHOUT_WEIGHTS
from armature.components.project import project_source

TEXT_TOKENS = 100
"""Of a prompt besides its images: the task, the setup and the state."""


@dataclass(frozen=True)
class PolicyGeometry:
    """`vlm`, `expert`: parameters; `met`: those that a token of a prompt is multiplied by, which embeddings are not.
    `layers`: of text and expert. `tokens`: of a prompt. `denoising`: steps of an answer. `width`: bytes of a weight."""

    vlm: int
    met: int
    expert: int
    layers: int
    tokens: int
    denoising: int
    width: int

    @property
    def parameters(self) -> int:
        return self.vlm + self.expert


def read_policy_config(settings: RobotPolicySettings) -> MolmoAct2Config:
    """The configuration of a tiny policy, or the config.json of a folder or a hub name.

    Raises:
        DataError: there is none here, and the hub does not answer.
    """
    if settings.tiny is not None:
        return tiny_config(settings.tiny)
    source = settings.checkpoint_path or settings.path
    assert source is not None
    file = locate(project_source(source), settings.revision, POLICY_WITHOUT_WEIGHTS) / CONFIG
    return MolmoAct2Config.from_dict(read_json(file), str(file))


def policy_geometry(config: MolmoAct2Config, settings: RobotPolicySettings, cameras: int) -> PolicyGeometry:
    """Counted on the meta device."""
    with torch.device("meta"):
        model = MolmoAct2(config)
    vlm, expert = (sum(part.numel() for part in each.parameters()) for each in (model.vlm, model.action_expert))
    text, vision = config.text_config, config.vit_config
    embeddings = (text.vocab_size + text.additional_vocab_size) * text.hidden_size
    head = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    side = -(-(vision.image_default_input_size[0] // vision.image_patch_size) // 2)
    return PolicyGeometry(
        vlm=vlm,
        met=vlm - embeddings - head,
        expert=expert,
        layers=text.num_hidden_layers,
        tokens=cameras * side * side + TEXT_TOKENS,
        denoising=settings.num_inference_steps or config.flow_matching_num_steps,
        width=2 if settings.dtype == "bfloat16" else 4,
    )
