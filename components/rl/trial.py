"""A trial of a recipe, which `armature check RECIPE --settings` makes: rollouts, and a learner in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.videos import Video
from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, LogProbs
from armature.components.contracts.stages import Artifact, ResultT
from armature.components.models.adapters import get_collator
from armature.components.models.load import load_model, load_processor
from armature.components.models.lora import base_model
from armature.components.rl.loop import run_loop
from armature.components.rl.run import RLRun
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rollouts.batches.table import SampleSource
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import MicroBatchLoader

VISIBLE = 1e-3
"""Learning rate of the trial: an update of this size changes weights in bfloat16 too."""


@dataclass(frozen=True)
class Trial:
    """Rollouts of the same few tasks with the recipe's settings and with one setting changed."""

    adapter: SampleSource
    images: ImageStore
    outputs: GenerateOutputs
    repeated: GenerateOutputs
    """Played with the same settings again."""
    other_seed: GenerateOutputs
    other_temperature: GenerateOutputs
    """Played with half the temperature."""
    lags: Sequence[int]
    """For each step of a short schedule: by how many versions the weights that play it are older than on-policy."""


def play_trial(run: RLRun) -> Trial:
    """Play the trial's rollouts on the servers of `run`, which hold the initial weights."""
    plan, tasks = run.settings.rollouts, run.preflight_tasks()

    def changed(**changes: Any) -> RLRun:
        settings = run.settings.model_copy(update={"rollouts": plan.model_copy(update=changes)})
        return RLRun(settings, run.context, run.store, replace(run.parts, heldout=None), run.portal)

    def played(**changes: Any) -> GenerateOutputs:
        return changed(**changes).play_tasks(tasks)[0]

    loop = changed().plan
    colder = plan.sampling.model_copy(update={"temperature": plan.sampling.temperature / 2})
    schedule = _Schedule()
    run_loop(schedule, 1, replace(loop, last=loop.max_staleness + 3), schedule, schedule)
    return Trial(
        run.parts.adapter,
        run.images,
        outputs=played(),
        repeated=played(),
        other_seed=played(seed=plan.seed + 1),
        other_temperature=played(sampling=colder),
        lags=schedule.lags,
    )


class _Schedule:
    """The units of `run_loop`, of which rollouts only note the version of the weights when they begin.

    It is also the executor, which calls each unit at once, and the receiver of the loop's reports.
    """

    def __init__(self) -> None:
        self.version, self.lags = 0, list[int]()
        self._nothing = Artifact(kind="", path=Path(), digest="")

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        future.set_result(unit(*arguments))
        return future

    def rollouts(self, step: int) -> Artifact:
        self.lags.append(step - 1 - self.version)
        return self._nothing

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        return rollouts

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> None:
        self.version = version

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    def evaluates(self, step: int) -> bool:
        return False

    def evaluate(self, step: int) -> bool:
        return False

    def stopped(self) -> bool:
        return False

    def wait_for_rollouts(self, step: int) -> None: ...

    def save(self, step: int) -> None: ...

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


# --- The learner in this process ---


class BlankImages(ImageStore):
    """An image store that opens every image, and every frame of a video, as a gray one of the same size."""

    def open(self, ref: ImageRef) -> Image.Image | Video:
        shown = super().open(ref)
        gray = Image.new("RGB", shown.size, (128, 128, 128))
        return replace(shown, frames=(gray,) * len(shown.frames)) if isinstance(shown, Video) else gray


class TrialLearner:
    """The learner of a run, with its model, in this process.

    Its settings are the recipe's, but with a constant learning rate that is large enough to be seen, and without an
    entropy bonus, whose gradient would add to the one that is checked.

    Args:
        weights: folder of the initial model.
        temperature: temperature at which the scored tokens were sampled.
        device: device on which the model computes.
        trainer: further changes of the trainer's settings.
    """

    def __init__(
        self,
        settings: TrainVLMSettings,
        weights: Path,
        images: ImageStore,
        temperature: float,
        device: torch.device,
        **trainer: Any,
    ) -> None:
        plain = {"learning_rate": VISIBLE, "warmup_steps": 0, "lr_scheduler": "constant", "entropy_coefficient": 0.0}
        plain |= {"samples_per_update": 0, "torch_compile": False}
        recomputes = {"gradient_checkpointing": bool(settings.model.gradient_checkpointing)}  # auto: yes
        model = settings.model.model_copy(update=recomputes)
        self._images = images
        self._collator = get_collator(weights, load_processor(weights, model))
        self.forbidden = sorted(self._collator.forbidden_token_ids)
        self.learner = Learner(
            load_model(weights, model, "cpu" if model.quantization is None else device),
            settings.trainer.model_copy(update=plain | trainer),
            temperature=temperature,
            forbidden_token_ids=self.forbidden,
            ranks=Ranks(device=device),
        )
        self.network = base_model(cast(Any, self.learner.model))

    def score(self, samples: Sequence[Sample], images: ImageStore | None = None) -> list[LogProbs]:
        """Return for each sample the log-probs (L,) of its sampled tokens, 0 elsewhere."""
        load = MicroBatchLoader(self._collator, images or self._images, workers=0)
        with load.batch():
            return self.learner.score(samples, load)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make a training step and return its metrics."""
        load = MicroBatchLoader(self._collator, self._images, workers=0)
        with load.batch():
            return self.learner.step(samples, load)

    def gradient_norm(self, samples: Sequence[Sample], **trainer: Any) -> float:
        """Return the norm of the gradients of a step, before clipping, and leave the weights as they are.

        Args:
            trainer: changes of the trainer's settings for this step.
        """
        before, usual = self.weights(), self.learner.settings
        self.learner.settings = usual.model_copy(update=trainer)
        norm = self.step(samples)["grad_norm"]
        self.learner.settings = usual
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(before[name])
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of all weights on the CPU, by name."""
        return {name: weight.detach().cpu().clone() for name, weight in self.network.named_parameters()}

    def changed(self, before: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the weights that differ from `before`."""
        return {name for name, weight in self.weights().items() if not torch.equal(weight, before[name])}
