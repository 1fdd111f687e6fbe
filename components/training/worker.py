"""The commands of a trainer service, as every rank carries them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.adapters import get_collator
from components.artifacts.images import ImageStore
from components.batches.check import check_samples, refusal
from components.batches.table import read_batch
from components.contracts.batches import Sample
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.images import ImageRef
from components.contracts.numbers import read_floats
from components.inference.checkpoint import vocabulary
from components.inference.endpoint import Endpoint
from components.inference.probe import Probe
from components.inference.weights import WEIGHT_SENDERS, WeightSender
from components.models.families import family_of
from components.models.load import load_model, load_processor
from components.models.lora import base_model
from components.training import checkpoints
from components.training.launch import sharder
from components.training.learner import Learner
from components.training.loader import MicroBatchLoader
from components.training.probe import answer_probe
from components.training.publish import Publisher
from components.training.ranks import Ranks
from components.training.service_settings import ServiceSettings

Command = dict[str, Any]


class TrainerWorker:
    """One rank's model, optimizer and position. `results` are those of the steps that the weights contain."""

    def __init__(self, settings: ServiceSettings, ranks: Ranks) -> None:
        policy = settings.policy
        self.settings, self.ranks = settings, ranks
        self.results: dict[int, dict[str, Any]] = {}
        processor = load_processor(policy.model_path, policy.model)
        collator = get_collator(policy.model_path, processor)
        model = load_model(policy.model_path, policy.model)
        family = family_of(base_model(model).config)
        self._identity = checkpoints.identity(
            model, policy.trainer, temperature=policy.temperature, loading=policy.model.model_dump(mode="json")
        )
        self._processor = processor
        self._publisher = Publisher(model, processor, settings.workspace / "processor")
        self.learner = Learner(
            model,
            policy.trainer,
            temperature=policy.temperature,
            forbidden_token_ids=sorted(collator.forbidden_token_ids),
            ranks=ranks,
            shard=sharder(ranks, family.wrap_classes, policy.trainer.autocast) if settings.shard else None,
        )
        self._sender: WeightSender | None = None
        self._vocabulary, self._images = vocabulary(policy.model_path), ImageStore(policy.images)
        self._load = MicroBatchLoader(collator, self._images, settings.loader_workers)

    def check(self, command: Command) -> list[Sample]:
        """What can be refused before anything is changed. The samples that the command names, if any.

        Raises:
            ConfigurationError: a step out of order.
            DataError: no readable batch, or one that cannot be trained on; names batch, row and field.
        """
        if command["name"] == "step" and command["step"] != self.learner.steps_done + 1:
            raise ConfigurationError(
                f"step {command['step']} was requested, but {self.learner.steps_done} steps are applied",
                where="trainer service",
                remedy=f"train step {self.learner.steps_done + 1} first",
            )
        if command["name"] in ("publish", "send", "probe") and command["version"] != self.learner.steps_done:
            raise ConfigurationError(
                f"version {command['version']} was requested, but the weights are of {self.learner.steps_done} steps",
                where="trainer service",
                remedy="publish right after the step",
            )
        if command["name"] == "send" and self.settings.weight_transfer not in WEIGHT_SENDERS:
            raise ConfigurationError(
                f"{self.settings.weight_transfer!r} needs no sender",
                where="machine.weight_transfer",
                remedy=f"publish a folder instead, or choose from {', '.join(WEIGHT_SENDERS)}",
            )
        if "batch" not in command:
            return []
        samples = read_batch(Path(command["batch"]))
        check_samples(samples, self._vocabulary, command["batch"])
        self._check_images(samples, command["batch"])
        return samples

    def _check_images(self, samples: list[Sample], batch: str) -> None:
        """
        Raises:
            DataError: an image is not in the store, or has changed there.
        """
        sound: set[ImageRef] = set()
        for row, sample in enumerate(samples):
            for ref in sample.images:
                try:
                    if ref not in sound:
                        self._images.read(ref)
                except DataError as error:
                    raise refusal(f"images: {error.what}", batch, row, sample) from error
                sound.add(ref)

    def recorded(self, command: Command) -> dict[str, float] | None:
        """The result of a step that is applied already.

        Raises:
            ConfigurationError: that step was trained on another batch.
        """
        known = self.results.get(command.get("step", 0)) if command["name"] == "step" else None
        if known is None:
            return None
        if known["batch"] != command["batch"]:
            raise ConfigurationError(
                f"step {command['step']} was trained on another batch",
                where=f"{known['batch']} and now {command['batch']}",
                remedy="resume from a checkpoint before that step to train it again",
            )
        metrics: dict[str, float] = known["metrics"]
        return metrics

    def run(self, command: Command, samples: list[Sample]) -> Any:
        """Carry out a checked command; on every rank."""
        match command["name"]:
            case "step":
                with self._load.batch():
                    metrics = self.learner.step(samples, self._load)
                self.results[command["step"]] = {"batch": command["batch"], "metrics": metrics}
                return metrics
            case "score":
                with self._load.batch():
                    return [one.tolist() for one in self.learner.score(samples, self._load)]
            case "publish":
                self._publisher.publish(self.learner.model, Path(command["folder"]), self.ranks)
                return None
            case "send":
                self._send([Endpoint(**endpoint) for endpoint in command["endpoints"]])
                return None
            case "probe":
                logprobs = answer_probe(self.learner.policy, self._processor, Probe(**command["probe"]))
                precise = self._publisher.float32 and self.settings.policy.trainer.autocast == "none"
                return {"logprobs": logprobs.tolist(), "dtype": "float32" if precise else "bfloat16"}
            case "save":
                state = {"results": {str(step): result for step, result in self.results.items()}}
                return str(checkpoints.save(self.learner, self.settings.checkpoints, state, self._identity))
            case "resume":
                return self._resume()
            case other:
                raise ConfigurationError(f"the trainer has no command {other!r}")

    def _send(self, endpoints: list[Endpoint]) -> None:
        """Connections last from version to version; other servers, or a failure, make new ones."""
        sender, self._sender = self._sender, None
        if sender is None or sender.endpoints != endpoints:
            sender = WEIGHT_SENDERS[self.settings.weight_transfer](endpoints, self.settings.sync_timeout)
        sender.send(self._publisher.tensors(self.learner.model))
        self._sender = sender

    def _resume(self) -> int:
        newest = self.ranks.broadcast(checkpoints.latest_name(self.settings.checkpoints))
        if newest is not None:
            state = checkpoints.load(self.learner, self.settings.checkpoints / newest, self._identity)
            self.results = {
                int(step): result | {"metrics": read_floats(result["metrics"])}
                for step, result in state["results"].items()
            }
        return self.learner.steps_done
