"""Our half of the GPU benchmark of SmolVLA; see `benchmarks.lerobot_gpu`. Usage: smolvla_ours [small]."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import SmolVLMConfig

from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.imitation.settings import Mode, VLATrainerSettings
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.norm_stats import FeatureNormStats, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import lerobot_weights
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig
from armature.components.robots.policies.smolvla.model import SmolVLA
from armature.components.robots.policies.smolvla.policy import SmolVLASampler
from armature.components.robots.policies.smolvla.processor import SmolVLABatch, SmolVLAExample, SmolVLAProcessor
from armature.components.training.ranks import Ranks
from benchmarks.policy_case import COMPARED, Side, fill, norm_of, serve
from benchmarks.smolvla_case import (
    ACTIONS,
    CAMERAS,
    CHUNK,
    STATES,
    WIDTH,
    arrays,
    flow_samples,
    make_tokenizer,
    policy_fields,
    vlm_config,
)


class Ours(Side):
    def __init__(self, small: bool) -> None:
        super().__init__(small)
        self.config = SmolVLAConfig(type="smolvla", **policy_fields(small))
        self.vlm = SmolVLMConfig(**vlm_config(small))
        self.settings = RobotPolicySettings(
            family="smolvla", checkpoint_path="drawn", chunk_size=CHUNK, n_action_steps=CHUNK
        )
        action, state = (FeatureNormStats(q01=(-1.0,) * n, q99=(1.0,) * n) for n in (ACTIONS, STATES))
        robot = RobotMetadata(camera_keys=CAMERAS, action_stats=action, state_stats=state)
        self.processor = SmolVLAProcessor(self.config, make_tokenizer(), self.settings, robot)

    def _model(self) -> SmolVLA:
        with torch.device("meta"):
            model = SmolVLA(self.config, self.vlm, self.dtype)
        model.to_empty(device=self.device)
        for name, tensor in lerobot_weights(model.state_dict()).items():
            fill(name, tensor)
        return model

    def _examples(self, count: int, *, trained: bool) -> list[SmolVLAExample]:
        made = arrays(self.small, count)
        for name in ("state", "actions"):
            made[name] = np.pad(made[name], [(0, 0)] * (made[name].ndim - 1) + [(0, WIDTH - made[name].shape[-1])])
        return [
            SmolVLAExample(
                input_ids=made["ids"][row][made["seen"][row]],
                images=made["images"][row] * 2 - 1,
                state=made["state"][row],
                actions=made["actions"][row] if trained else None,
                valid=np.ones(CHUNK, bool) if trained else None,
            )
            for row in range(count)
        ]

    def _batch(self, count: int) -> SmolVLABatch:
        return self.processor.batch(self._examples(count, trained=True), multiple=32)

    def open_answer(self, rows: int) -> dict[str, Any]:
        model, examples = self._model(), self._examples(rows, trained=False)
        if not self.small:
            model.compile_layers(dynamic=False)
        sampler = SmolVLASampler(model, self.processor, self.settings, rows)
        self.work = lambda: sampler.sample(examples, range(rows))
        return {"norm": self.work()[0, :, :ACTIONS].norm().item()}

    def open_training(self, mode: Mode, batch: int) -> dict[str, Any]:
        model, frozen = self._model(), mode == "expert"
        settings = VLATrainerSettings(
            mode=mode,
            freeze_embedding=frozen,
            max_steps=1000,
            batch_size=batch,
            micro_batch_size=batch,
            torch_compile=not self.small,
        )
        prepare(model, settings, "head")
        learner = PolicyLearner(model, settings, None, Ranks(device=self.device))
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        times, noise = flow_samples(COMPARED)
        draws = FlowSamples(1 - times[:, None], noise[:, None]).to(self.device)
        losses = model(self._batch(COMPARED).to(self.device), draws, None)
        losses.total.backward()
        result = {"loss": losses.total.item(), "norm": norm_of(model.parameters())}
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        model.zero_grad(set_to_none=True)
        made, draws_of_step = self._batch(batch).to(self.device), self._draws(batch)
        self.work = lambda: learner.step([PolicyMicroBatch(made, next(draws_of_step), batch)])
        return result | {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}

    def _draws(self, batch: int) -> Iterator[FlowSamples]:
        seed = 0
        while True:
            yield FlowSamples.per_example(range(seed, seed + batch), 1, CHUNK, self.config)
            seed += batch


if __name__ == "__main__":
    serve(Ours("small" in sys.argv))
