"""Our half of the GPU benchmark of robot policies; see `benchmarks.lerobot_gpu`. Usage: policy_ours [small]."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from armature.components.models.settings import AdapterSettings
from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.imitation.settings import Mode, VLATrainerSettings
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.molmoact2.checkpoints.weights import (
    FREQUENCIES,
    frequencies,
    load_weights,
    to_released,
)
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan, LossPlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2, Precision
from armature.components.robots.policies.molmoact2.processing.batch import Example, collate
from armature.components.robots.policies.molmoact2.sampling import Sampler
from armature.components.robots.policies.settings import ActionMode
from armature.components.training.ranks import Ranks
from benchmarks.policy_case import (
    ACTIONS,
    CHUNK,
    COMPARED,
    DRAWS,
    IMAGES,
    PAD,
    Side,
    examples,
    fill,
    flow_samples,
    norm_of,
    patches_of,
    serve,
)


class Drawn:
    """A checkpoint whose weights are random numbers that depend only on the names of the weights."""

    def __init__(self, model: MolmoAct2, config: MolmoAct2Config, device: torch.device) -> None:
        state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in to_released(state, config.molmo2()).items()}
        self._shapes[FREQUENCIES] = tuple(frequencies(config.molmo2()).shape)
        self._device = device

    @property
    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], device="cpu" if name == FREQUENCIES else self._device)
        fill(name, tensor)
        return tensor


class Ours(Side):
    def __init__(self, small: bool) -> None:
        super().__init__(small)
        self.config = MolmoAct2Config.from_dict(self.raw)

    def _model(self, dtype: Precision, dropout: float) -> MolmoAct2:
        with torch.device("meta"):
            model = MolmoAct2(self.config, dtype, residual_dropout=dropout)
        model.to_empty(device=self.device)
        load_weights(model, Drawn(model, self.config, self.device), self.config.molmo2(), "drawn")
        return model

    def open_answer(self, rows: int) -> dict[str, Any]:
        """Prepare calls that compute `rows` answers at once. `distances` says how far the first row's actions are from
        actions computed in fp32 with plain operations, relative to the norm of the latter: first for plain bf16
        operations, then for the measured code."""
        arguments = examples_of(self.raw, rows, answers=False, trained=False)
        exact, plain = (self._plain_actions(dtype, arguments[:1]) for dtype in ("float32", "bfloat16"))
        model = self._model("bfloat16", 0.0)
        model.cast_for_inference()
        model.compile_layers(dynamic=False)
        sampler = self._sampler(model, rows)
        self.work = lambda: sampler.sample(arguments, range(rows))
        far = [float((each - exact).norm() / exact.norm()) for each in (plain, self.work()[:1])]
        return {"tokens": sum(one.length for one in arguments), "distances": far}

    def _plain_actions(self, dtype: Precision, examples: list[Example]) -> torch.Tensor:
        sampler = self._sampler(self._model(dtype, 0.0), 1)
        sampler._euler_steps = sampler._euler
        return sampler.sample(examples, [0])

    def _sampler(self, model: MolmoAct2, rows: int) -> Sampler:
        plan = InferencePlan(bidirectional_images=True, hides_answers=True, mask_dimensions=True, steps=10)
        return Sampler(model, plan, CHUNK, rows, 640, PAD)

    def open_training(self, mode: Mode, batch: int) -> dict[str, Any]:
        model = self._model("bfloat16", 0.1)
        settings = trainer_settings(mode, batch, compiled=not self.small)
        prepare(model, settings, "head")
        plan = loss_plan("continuous" if mode == "expert" else "both")
        chosen = examples_of(self.raw, batch, answers=mode != "expert", trained=True)
        made, tokens = collate(chosen, "left", 8, PAD), sum(one.length for one in chosen)
        learner = PolicyLearner(model, settings, plan, Ranks(device=self.device))
        few = collate(chosen[:COMPARED], "left", 8, PAD).to(self.device)
        losses = model.eval()(few, FlowSamples(*flow_samples(self.raw)).to(self.device), plan)
        losses.total.backward()
        result = {"loss": losses.total.item(), "norm": norm_of(model.action_expert.parameters())}
        model.zero_grad(set_to_none=True)
        draws = self._draws(batch)
        self.work = lambda: learner.step([PolicyMicroBatch(made, next(draws), tokens)])
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return result | {"tokens": tokens, "trained": trained}

    def _draws(self, batch: int) -> Iterator[FlowSamples]:
        seed = 0
        while True:
            yield FlowSamples.per_example(range(seed, seed + batch), DRAWS, CHUNK, self.config)
            seed += batch


def loss_plan(action_mode: ActionMode) -> LossPlan:
    return LossPlan(action_mode, False, action_mode == "both", False, True, 1e-4, "root_subsegments_root_tokens")


def trainer_settings(mode: Mode, batch: int, *, compiled: bool) -> VLATrainerSettings:
    return VLATrainerSettings(
        mode=mode,
        lora=AdapterSettings(rank=64, alpha=16.0) if mode == "lora" else None,
        gradient_checkpointing=True,
        torch_compile=compiled,
        max_steps=1000,
        batch_size=batch,
        micro_batch_size=batch,
    )


def examples_of(raw: dict[str, Any], count: int, *, answers: bool, trained: bool) -> list[Example]:
    """Return `count` examples of `benchmarks.policy_case` in our format. They have action tokens if `answers` is set,
    and actions if `trained` is set."""
    side = patches_of(raw)
    return [
        Example(
            input_ids=one["ids"],
            image_tokens=one["image_tokens"],
            pixel_values=one["pixels"],
            pooling=np.concatenate(
                [np.where(one["windows"] < 0, -1, one["windows"] + n * side**2) for n in range(IMAGES)]
            ),
            labels=one["labels"],
            actions=one["actions"] if trained else None,
            horizon_padding=np.zeros(CHUNK, bool) if trained else None,
            dimension_padding=np.arange(raw["max_action_dim"]) >= ACTIONS,
        )
        for one in examples(raw, count, answers=answers)
    ]


if __name__ == "__main__":
    serve(Ours("small" in sys.argv))
