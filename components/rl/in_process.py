"""A trainer that runs in the caller's process, and the adapter for users' own batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import PreTrainedTokenizerBase

from armature.components.contracts.batches import MultimodalBatch, Sample, TurnAdvantages
from armature.components.contracts.errors import ConfigurationError, TrainerError
from armature.components.contracts.files import is_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.stages import not_sent
from armature.components.inference.command import read_config
from armature.components.models.adapters import MultimodalAdapter
from armature.components.models.adapters.family import validate_batch
from armature.components.models.source import REFERENCE, check_source_name, locate
from armature.components.training.checkpoints import identity
from armature.components.training.client import ResultT
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import service_settings
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from armature.components.vlm.learner import Learner
from armature.components.vlm.packing import MicroBatch
from armature.components.vlm.publish import Publisher
from armature.components.vlm.worker import Loader, TokenWorker


def check_model(model: Any, processor: Any, adapter: Any) -> None:
    """Check that `model` is a transformers model with its processor, or a text that names one.

    Raises:
        ConfigurationError: an argument has another type, or a model comes without its processor.
    """
    if not isinstance(model, nn.Module | str | Path):
        raise ConfigurationError(
            f"model is {type(model).__name__}",
            code="model_wrong_type",
            where="MultimodalGRPOTrainer",
            remedy="pass a transformers model, a folder, or a name on the hub",
        )
    if isinstance(model, nn.Module) and processor is None:
        raise ConfigurationError(
            f"{type(model).__name__} comes without its processor",
            code="processor_missing",
            where="MultimodalGRPOTrainer",
            remedy="pass AutoProcessor.from_pretrained(...) as tokenizer",
        )
    if adapter is not None and not hasattr(adapter, "build_batch"):
        raise ConfigurationError(
            f"adapter is {type(adapter).__name__}, which builds no batches",
            code="adapter_wrong_type",
            where="MultimodalGRPOTrainer",
            remedy="pass config= and all other arguments after tokenizer by name; an adapter is rarely needed",
        )
    takes_text_only = adapter is None and isinstance(processor, PreTrainedTokenizerBase)
    if isinstance(processor, str | Path) or takes_text_only:
        raise ConfigurationError(
            f"tokenizer is {type(processor).__name__}, which takes no images",
            code="processor_missing",
            where="MultimodalGRPOTrainer",
            remedy="pass the model's processor, AutoProcessor.from_pretrained(...), of which the tokenizer is a part; "
            "for a model by name leave it out",
        )


def check_source(model: Any) -> None:
    """Check that a model that is given by name is a checkpoint on this machine, or may be a name on the hub.

    Raises:
        DataError: there is no such folder, or it has no config.json.
    """
    if isinstance(model, str | Path):
        check_source_name(str(model), "main")
        if is_folder(model) and not (Path(model) / REFERENCE).is_file():
            read_config(locate(model))


class InProcessTrainer(TrainerClient):
    """A trainer client whose worker runs in this process and trains the given model in place.

    Args:
        processor: the model's processor, which is saved beside the weights and prepares the image of a probe.
        load: turns the micro-batches of a step into tensors.
        folder: the folder for `checkpoints/` and `processor/`.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        policy: TrainerPolicySettings,
        *,
        forbidden_token_ids: Sequence[int],
        load: Loader,
        machine: Machine,
        folder: Path,
    ) -> None:
        self.machine, self.settings = machine, service_settings(policy, machine, folder)
        self._saved = not_sent
        who = identity(model, policy.trainer, temperature=policy.temperature)
        publisher = Publisher(model, processor, folder / "processor")
        self.learner = Learner(
            model,
            policy.trainer,
            temperature=policy.temperature,
            forbidden_token_ids=forbidden_token_ids,
            ranks=Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            may_recompute=policy.model.gradient_checkpointing == "auto",
        )
        self._worker = TokenWorker(self.settings, self.learner, processor, publisher, load, who)

    @property
    def alive(self) -> bool:
        """True, because the worker lives as long as this process."""
        return True

    def start(self) -> None:
        """Do nothing: the worker is ready."""

    def stop(self) -> None:
        """Do nothing: the worker ends with this process."""

    def _ask(self, name: str, timeout: float, result: TypeAdapter[ResultT], **arguments: Any) -> ResultT:
        command = {"name": name, **arguments}
        reply = self._worker.recorded(command)
        try:
            if reply is None:
                reply = self._worker.run(command, self._worker.check(command))
        except torch.OutOfMemoryError as error:
            raise TrainerError(
                f"the GPU's memory is not enough for {name!r}: {error}",
                code="out_of_memory",
                where="MultimodalRLConfig",
                remedy="set gradient_checkpointing=True, a smaller max_tokens_per_micro_batch, or lora={'rank': 16}; "
                "then run the script again, which resumes",
            ) from error
        return result.validate_python(reply)


class UserAdapter:
    """Lets a user's adapter that only has `build_batch` work in the loop, as source of samples and as loader.

    The adapter gets `size` trajectories at a time, and the batch that it builds from them is one forward pass. If the
    batch has one row per trajectory, each row has the advantage of its trajectory; otherwise the advantage of a row is
    its reward less the mean reward of all rows.

    Args:
        rollouts: returns the rollouts of a step. After a restart the adapter may have to build a batch again.
    """

    def __init__(self, adapter: MultimodalAdapter, size: int, rollouts: Callable[[int], GenerateOutputs]) -> None:
        self.adapter, self._size, self._rollouts = adapter, size, rollouts
        self._batches: dict[str, MultimodalBatch] = {}

    def samples(
        self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
    ) -> tuple[list[Sample], Counter[str]]:
        """Return the rows of the adapter's batches as samples, and no drops.

        Raises:
            DataError: a batch has wrong shapes; the error names the field.
        """
        every = outputs.trajectories
        parts = [every[start : start + self._size] for start in range(0, len(every), self._size)]
        batches = [validate_batch(self.adapter.build_batch(GenerateOutputs(part))) for part in parts]
        self._batches = {part[0].trajectory_id: batch for part, batch in zip(parts, batches, strict=True)}
        mean = float(torch.cat([torch.zeros(0), *(batch.rewards.double() for batch in batches)]).mean())
        pairs = zip(parts, batches, strict=True)
        return [row for part, batch in pairs for row in _rows(part, batch, advantages or {}, mean)], Counter()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Return a context for the micro-batches of one step; see `MicroBatchLoader.batch`."""
        yield

    def __call__(self, plan: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, MultimodalBatch]]:
        """Yield the adapter's batches that contain the planned samples, with the loss of all other rows masked.

        The plan's own division into micro-batches is ignored, because a batch of the adapter is one forward pass.
        """
        planned: dict[str, dict[int, tuple[int, Sample]]] = defaultdict(dict)
        for micro in plan:
            for position, sample in zip(micro.rows, micro.samples, strict=True):
                name, _, number = sample.sample_id.rpartition("/")
                planned[name][int(number)] = position, sample
        for name, rows in sorted(planned.items()):
            batch = self._batch(name)
            mask, advantages = torch.zeros_like(batch.loss_mask), torch.zeros(batch.loss_mask.shape)
            for row, (_, sample) in rows.items():
                mask[row] = batch.loss_mask[row]
                advantages[row, batch.attention_mask[row].bool().cpu()] = torch.tensor(sample.advantages)
            positions = tuple(rows[row][0] if row in rows else -1 for row in range(len(mask)))
            yield MicroBatch((), positions), replace(batch, loss_mask=mask, advantages=advantages)

    def _batch(self, name: str) -> MultimodalBatch:
        if name not in self._batches:
            self.samples(self._rollouts(int(name.partition("-")[0])))
        return self._batches[name]


def _rows(
    part: Sequence[Trajectory], batch: MultimodalBatch, advantages: TurnAdvantages, mean: float
) -> Iterator[Sample]:
    for row, reward in enumerate(batch.rewards.tolist()):
        trajectory = part[row] if len(part) == len(batch.rewards) else part[0]
        keep = batch.attention_mask[row].bool()
        trained = batch.loss_mask[row, keep].bool().cpu().numpy()
        values = np.full(len(trained), reward - mean)
        if batch.advantages is not None:
            values = batch.advantages[row, keep].double().cpu().numpy()
        elif len(part) == len(batch.rewards):
            values[:] = advantages.get((trajectory.trajectory_id, trajectory.turns[0].index), reward - mean)
        yield Sample(
            sample_id=f"{part[0].trajectory_id}/{row}",
            group_id=trajectory.group_id,
            trajectory_id=trajectory.trajectory_id,
            input_ids=batch.input_ids[row, keep].cpu().numpy().astype(np.int32),
            loss_mask=trained,
            behavior_logprobs=batch.behavior_logprobs[row, keep].float().cpu().numpy(),
            policy_versions=np.where(trained, trajectory.turns[0].policy_version, -1).astype(np.int32),
            advantages=np.where(trained, values, 0.0).astype(np.float32),
            reward=reward,
            images=trajectory.turns[-1].images,
        )
