"""The worker of a trainer service for vision-language models: one rank, and the commands that it carries out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.batches import MultimodalBatch, Sample
from armature.components.contracts.errors import ConfigurationError, DataError, TrainerError
from armature.components.contracts.images import ImageRef
from armature.components.families.family import family_of
from armature.components.inference.command import vocabulary
from armature.components.inference.probe import Probe
from armature.components.inference.replies import Endpoint
from armature.components.inference.weights import WEIGHT_SENDERS, WeightSender
from armature.components.models.adapters import get_collator
from armature.components.models.load import MappedWeights, load_model, load_processor, read_model
from armature.components.models.lora import base_model
from armature.components.rollouts.batches.ratios import write_log_ratios
from armature.components.rollouts.batches.table import check_samples, read_batch, refusal, write_batch
from armature.components.training.checkpoints import identity
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings
from armature.components.training.service_worker import Command, ServiceWorker
from armature.components.training.sharding import blocks, sharder
from armature.components.vlm.client import OUT_OF_MEMORY, RECOMPUTES, TrainerPolicySettings
from armature.components.vlm.learner import Learner, Teacher
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.logprobs import Policy, answer_probe
from armature.components.vlm.memory import chosen_recomputation, keeps_gathered, memory_of_rank
from armature.components.vlm.packing import MicroBatch
from armature.components.vlm.publish import Publisher

ALL_STEPS = sys.maxsize
RECOMPUTED = "activations-recomputed"
"""Name of an empty file in the workspace, if "auto" has turned out to be too much for the memory."""
logger = logging.getLogger(__name__)


class Loader(Protocol):
    """Turns planned micro-batches into tensors, as `armature.components.vlm.loader.MicroBatchLoader` does."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a context in which the micro-batches of one step are loaded."""
        ...

    def __call__(self, plan: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, MultimodalBatch]]:
        """Yield each micro-batch of `plan` with its tensors."""
        ...


class TokenWorker(ServiceWorker):
    """A rank that trains a given learner on batches of samples, scores them, and publishes its weights.

    Args:
        processor: the model's processor, which prepares the image of a probe.
        publisher: writes the weights.
        load: turns planned micro-batches into tensors.
        who: see `ServiceWorker`.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        learner: Learner,
        processor: Any,
        publisher: Publisher,
        load: Loader,
        who: dict[str, Any],
    ) -> None:
        self.policy = policy = TrainerPolicySettings.model_validate(settings.training)
        self.learner, self._processor, self._publisher, self._load = learner, processor, publisher, load
        self._sender: WeightSender | None = None
        self._vocabulary, self._images = vocabulary(policy.model_path), ImageStore(policy.images)
        super().__init__(settings, learner, who, policy.trainer.keep_checkpoints, ALL_STEPS)

    def prepare(self, command: Command) -> list[Sample]:
        """Read and check the samples of the batch that the command names; empty if it names none.

        Raises:
            ConfigurationError: the command is "send", but the weight transfer does not use a sender.
            DataError: the batch is not readable or cannot be trained on; the error names batch, row and field.
        """
        if command["name"] == "send" and self.settings.weight_transfer not in WEIGHT_SENDERS:
            raise ConfigurationError(
                f"weight transfer {self.settings.weight_transfer!r} does not send weights from GPUs",
                code="sender_not_needed",
                where="machine.servers.weight_transfer",
                remedy=f"publish a folder instead, or set it to one of {', '.join(WEIGHT_SENDERS)}",
            )
        if "batch" not in command:
            return []
        samples = read_batch(Path(command["batch"]))
        check_samples(samples, self._vocabulary, command["batch"])
        self._check_images(samples, command["batch"])
        return samples

    def _check_images(self, samples: list[Sample], batch: str) -> None:
        """Check that all images of the samples are in the store.

        Raises:
            DataError: an image is not in the store, or has changed there.
        """
        checked: set[ImageRef] = set()
        for row, sample in enumerate(samples):
            for ref in sample.images:
                try:
                    if ref not in checked:
                        self._images.read(ref)
                except DataError as error:
                    raise refusal(f"images: {error.what}", batch, row, sample) from error
                checked.add(ref)

    def train(self, command: Command, prepared: list[Sample]) -> dict[str, float]:
        """Make a training step on the samples, and write their log-ratios if the command asks for them.

        Raises:
            TrainerError: the memory of one of several ranks is not enough. After a restart they recompute activations.
            torch.OutOfMemoryError: the memory is not enough, and activations are recomputed already or may not be.
        """
        recomputed = self.settings.workspace / RECOMPUTED
        try:
            with self._load.batch():
                metrics = self.learner.step(prepared, self._load)
        except torch.OutOfMemoryError as error:
            if self.policy.model.gradient_checkpointing != "auto" or self.learner.policy.recomputes:
                raise
            recomputed.touch()
            raise TrainerError(RECOMPUTES, code="out_of_memory", where=f"rank {self.ranks.rank}") from error
        if OUT_OF_MEMORY in metrics:
            recomputed.touch()
        if "log_ratios" in command and self.ranks.first:
            try:
                write_log_ratios(Path(command["log_ratios"]), prepared, self.learner.log_ratios)
            except OSError as error:  # only people read the ratios, and the step is applied already
                logger.warning("the token ratios of step %d were not written: %s", command["step"], error)
        return metrics

    def perform(self, command: Command, prepared: list[Sample]) -> Any:
        """Carry out a command that is not a training step.

        It scores or evaluates the samples, publishes or sends the weights, or answers a probe.
        """
        match command["name"]:
            case "score":
                with self._load.batch():
                    return [one.tolist() for one in self.learner.score(prepared, self._load)]
            case "teach":
                with self._load.batch():
                    taught = self.learner.teach(prepared, self._load, command["kind"])
                if self.ranks.first:
                    write_batch(Path(command["folder"]), taught)
                return None
            case "evaluate":
                with self._load.batch():
                    return self.learner.evaluate(prepared, self._load)
            case "publish":
                publish = {
                    "file": self._publisher.publish,
                    "delta": self._publisher.publish_delta,
                    "adapter": self._publisher.publish_adapter,
                }[command.get("form", "file")]
                publish(self.learner.model, Path(command["folder"]), self.ranks)
                return None
            case "send":
                self._send([Endpoint(**endpoint) for endpoint in command["endpoints"]])
                return None
            case "probe":
                logprobs = answer_probe(self.learner.policy, self._processor, Probe(**command["probe"]))
                precise = self._publisher.float32 and self.policy.trainer.autocast == "none"
                return {"logprobs": logprobs.tolist(), "dtype": "float32" if precise else "bfloat16"}
            case other:
                raise ConfigurationError(f"the trainer does not have a command {other!r}", code="unknown_command")

    def _send(self, endpoints: list[Endpoint]) -> None:
        """Send the weights to servers. Connections are reused until the servers change or sending fails."""
        if self._sender is not None and self._sender.endpoints != endpoints:
            self._disconnect()
        if self._sender is None:
            self._sender = WEIGHT_SENDERS[self.settings.weight_transfer](endpoints, self.settings.sync_timeout)
        try:
            self._sender.send(self._publisher.tensors(self.learner.model))
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class TrainerWorker(TokenWorker):
    """A rank of the service: it loads the model in a folder, shards it if asked, and makes the learner."""

    def __init__(self, settings: ServiceSettings, ranks: Ranks) -> None:
        policy = TrainerPolicySettings.model_validate(settings.training)
        room = memory_of_rank(settings.processes, ranks.device if ranks.device.type == "cuda" else None)
        trained = policy.trainer, settings.processes, min(ranks.gather(room))
        loaded = chosen_recomputation(policy.model_path, policy.model, *trained)
        if (settings.workspace / RECOMPUTED).exists():
            loaded = policy.model.model_copy(update={"gradient_checkpointing": True})
        processor = load_processor(policy.model_path, policy.model)
        collator = get_collator(policy.model_path, processor)
        sharded, experts = settings.processes.sharding is not None, settings.processes.sharding == "experts"
        low = policy.trainer.autocast == "bf16" or policy.trainer.weights == "bfloat16"

        def shard_of(
            model: Any, weights: MappedWeights | None, keep: bool, experts: bool = False
        ) -> Callable[[Policy], None] | None:
            if not sharded:
                return None
            units = partial(blocks, family=family_of(base_model(model).config), dtype=torch.bfloat16 if low else None)
            named = weights.of("model") if weights else None
            methods, copies = ["next_tokens", "own_logits"], settings.processes.copies
            return sharder(ranks, copies, units, named, cast_inputs=True, methods=methods, keep=keep, experts=experts)

        # Rank 0 reads the weights before any model is made, so that adapters get the same random numbers as in one
        # process.
        read = read_model(policy.model_path, policy.model) if sharded and ranks.first else None
        # A model in 4 bits is small enough to be quantized on the device.
        device = "cpu" if policy.model.quantization is None else ranks.device
        model = load_model(policy.model_path, loaded, device, empty=sharded)
        whole, weights = read or (model, None)
        loading = policy.model.model_dump(mode="json")
        who = None
        if ranks.first:
            who = identity(whole, policy.trainer, weights, temperature=policy.temperature, loading=loading)
        publisher = Publisher(model, processor, settings.workspace / "processor")
        teacher = None
        if policy.teacher is not None:
            teacher = Teacher(policy.teacher, {})
            for kind, path in policy.teacher_paths.items():
                source = path, policy.teacher.models[kind].model
                taught = read_model(*source)[1] if sharded and ranks.first else None
                scoring = load_model(*source, empty=sharded)
                teacher.models[kind] = scoring, shard_of(scoring, taught, keep=False)
        learner = Learner(
            model,
            policy.trainer,
            temperature=policy.temperature,
            forbidden_token_ids=sorted(collator.forbidden_token_ids) if policy.sampled else (),
            ranks=ranks,
            shard=shard_of(model, weights, sharded and keeps_gathered(policy.model_path, loaded, *trained), experts),
            teacher=teacher,
            may_recompute=policy.model.gradient_checkpointing == "auto",
        )
        load = MicroBatchLoader(collator, ImageStore(policy.images), settings.loader_workers, part=ranks.part)
        super().__init__(settings, learner, processor, publisher, load, ranks.broadcast(who))
