"""Server and trainer give the same log-probs through three real training steps and three syncs.

Families with tied and untied embeddings are tested on two turns with several images of all sizes, modes and
orientations. Some families run by default, all with ARMATURE_TEST_FAMILIES=all.
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.batches import Sample
from armature.components.contracts.images import EncodedImage, ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory, Turn
from armature.components.families.family import FAMILIES
from armature.components.models.adapters import get_adapter
from armature.components.models.load import load_processor
from armature.components.models.settings import LoraSettings
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.components.rollouts.batches.table import write_batch
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import service_settings
from armature.components.vlm.client import TrainerPolicySettings
from armature.components.vlm.worker import TrainerWorker
from tests.builders import make_machine
from tests.family_table import ALL, can_run, record, scope
from tests.vlm.conftest import trainer_settings

from .conftest import Engine
from .test_serving import SETTINGS

TOLERANCE = 1e-5  # nats per token, both in fp32
STEPS = 3
DEFAULT = (
    *(("qwen3-vl", True), ("qwen2.5-vl", True), ("gemma3", True), ("mistral3", True)),
    *(("molmo2", False), ("smolvlm", False), ("qwen3.5", False), ("qwen3-vl-moe", False)),
)
EVERY = [(name, tied) for name in FAMILIES for tied in (True, False) if can_run(name, "tied" if tied else "untied")]
CASES = EVERY if ALL else DEFAULT
ADAPTED = [name for name in FAMILIES if can_run(name, "adapters")] if ALL else ["smolvlm"]

TRAINER = trainer_settings(
    learning_rate=3e-3,
    max_steps=STEPS,
    max_tokens_per_micro_batch=4096,
    logprobs={"name": "torch", "chunk_tokens": 64},
    save_every=STEPS,
    keep_checkpoints=1,
)


def image_files() -> list[EncodedImage]:
    """Return encoded images in several modes, orientations, formats and sizes."""
    random = np.random.default_rng(0)
    made = []
    kinds = ("RGB PNG", "RGBA PNG", "L JPEG", "LA PNG", "P PNG", "CMYK JPEG", "1 PNG", "RGBA WEBP", "RGB JPEG")
    for index, (mode, kind) in enumerate(one.split() for one in kinds):
        noise = random.integers(0, 256, (60 + 8 * index, 110 - 9 * index, 4), dtype=np.uint8)
        image = Image.fromarray(noise if mode in ("RGBA", "LA") else noise[..., :3])
        exif = Image.Exif()
        exif[0x0112] = index % 8 + 1
        file = io.BytesIO()
        image.convert(mode).save(file, kind, exif=exif)
        made.append(EncodedImage(file.getvalue(), f"image/{kind.lower()}"))
    return made


def user(words: str, images: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": [*images, {"type": "text", "text": words}]}


def turn(index: int, answer: dict[str, Any], images: list[ImageRef], version: int) -> Turn:
    return Turn(
        index=index,
        prompt_token_ids=np.array(answer["prompt"], np.int32),
        completion_token_ids=np.array(answer["sampled"], np.int32),
        completion_logprobs=np.array(answer["logprobs"], np.float32),
        finish_reason="stop",
        policy_version=version,
        images=tuple(images),
        messages="[]",
        completion=answer["text"],
        reward=0.0,
        reward_parts={},
        anchor_key=None,
        admissible_key=None,
        action_defect=None,
        generate_seconds=0.0,
        environment_seconds=0.0,
        experts=None if answer["experts"] is None else np.array(answer["experts"], np.uint8),
    )


class Loop:
    """A training loop: a trainer in this process, and a server that answers conversations of two turns."""

    def __init__(self, family: str, tied: bool, folder: Path, lora: LoraSettings | None = None) -> None:
        sizes = SMALL.model_copy(update={"tie_embeddings": tied})
        attention = "causal" if FAMILIES[family].image_attention else None  # as vLLM's CPU attention is causal
        self.folder = folder
        self.start = make_tiny_checkpoint(family, folder / "weights/0", 0, sizes, attention)
        store = ImageStore(folder / "images")
        self.processor = load_processor(self.start, SETTINGS)
        self.adapter = get_adapter(self.start, self.processor, store.open)
        self.images = [store.put(image) for image in image_files()]
        self.parts = [self._part(store, ref) for ref in self.images]
        policy = TrainerPolicySettings(
            model_path=self.start,
            model=SETTINGS.model_copy(update={"lora": lora}),
            trainer=TRAINER,
            temperature=0.7,
            images=store.root,
        )
        (folder / "work").mkdir()
        self.worker = TrainerWorker(service_settings(policy, make_machine(loader_workers=0), folder / "work"), Ranks())

    def do(self, **command: Any) -> Any:
        return self.worker.run(command, self.worker.check(command))

    def samples(self, engine: Engine, version: int) -> list[Sample]:
        """Have three conversations with the server, each of two turns with images, and return their training
        samples."""
        bias = {str(token): -100.0 for token in self.adapter.collator.forbidden_token_ids if token < self.rows}
        chats = [[user("look", self.parts[i : i + 2])] for i in (0, 3, 6)]
        first = engine("ask", chats, 0.7, bias)
        for chat, answer, i in zip(chats, first, (2, 5, 8), strict=True):
            chat += [{"role": "assistant", "content": answer["text"]}, user("and", self.parts[i : i + 1])]
        second = engine("ask", chats, 0.7, bias)
        rollouts = []
        for number, (one, two) in enumerate(zip(first, second, strict=True)):
            shown = self.images[3 * number : 3 * number + 3]
            turns = (turn(0, one, shown[:2], version), turn(1, two, shown, version))
            rollouts.append(Trajectory(f"t{number}", "g", "test", f"task{number}", "train", turns, truncated=False))
        samples, drops = self.adapter.samples(GenerateOutputs(rollouts))
        assert not drops and sum(sample.loss_mask.sum() for sample in samples) >= 3 * 2
        return samples

    def _part(self, store: ImageStore, ref: ImageRef) -> dict[str, Any]:
        data = base64.b64encode(store.read(ref)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:{ref.media_type};base64,{data}"}}

    @property
    def rows(self) -> int:
        return len(self.worker.learner.policy.forbidden)

    def difference(self, samples: list[Sample], version: int) -> float:
        """Return the largest absolute difference between the trainer's and the server's log-probs of the samples'
        trained tokens, in nats."""
        batch = self.folder / f"scored-{version}"
        batch.mkdir()
        write_batch(batch, samples)
        scores = self.do(name="score", batch=str(batch))
        pairs = zip(scores, samples, strict=True)
        return max(float(np.abs(np.array(s) - x.behavior_logprobs)[x.loss_mask].max()) for s, x in pairs)

    def step(self, samples: list[Sample], version: int, form: str = "file") -> Path:
        """Make a training step on these samples, and return the folder of the published weights or adapters."""
        random = np.random.default_rng(version)
        rewarded = [
            replace(one, advantages=np.where(one.loss_mask, random.normal(), 0.0).astype(np.float32)) for one in samples
        ]
        batch = self.folder / f"batch-{version}"
        batch.mkdir()
        write_batch(batch, rewarded)
        metrics = self.do(name="step", step=version + 1, batch=str(batch))
        # In fp32 the trainer chooses the experts that the server has returned for each token.
        assert metrics.get("experts/other_fraction") == (None if samples[0].experts is None else 0)
        folder = self.folder / "weights" / str(version + 1)
        self.do(name="publish", version=version + 1, folder=str(folder), form=form)
        return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "tied"), CASES, ids=[f"{n}-{'tied' if t else 'untied'}" for n, t in CASES])
def test_server_and_trainer_logprobs_agree_through_training(family, tied, engine, tmp_path):
    loop = Loop(family, tied, tmp_path)
    engine("start", str(loop.start))
    samples, differences = loop.samples(engine, 0), []
    assert (samples[0].experts is not None) == family.endswith("-moe")
    for version in range(STEPS):
        differences.append(loop.difference(samples, version))
        stale = samples
        engine("load", str(loop.step(samples, version)))
        samples = loop.samples(engine, version + 1)
    differences.append(loop.difference(samples, STEPS))
    print(f"{family} {'tied' if tied else 'untied'}: {', '.join(f'{one:.1e}' for one in differences)} nats")
    assert max(differences) < TOLERANCE
    assert loop.difference(stale, STEPS + 1) > 100 * TOLERANCE  # a single missed step would be noticed
    record(family, "tied" if tied else "untied", max(differences), served=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ADAPTED)
def test_server_with_adapters_and_trainer_agree(family, engine, tmp_path):
    """Adapters of a rank that vLLM rounds up are on every linear layer of the widest scope that it serves."""
    widest = scope(FAMILIES[family])
    lora = LoraSettings(rank=5, alpha=20.0, targets=("all",), scope=widest, served_as="adapter")
    loop = Loop(family, can_run(family, "tied"), tmp_path, lora)
    engine("start", str(loop.start), 0, lora.rank, widest == "all")
    stale = loop.samples(engine, 0)
    engine("adapt", str(loop.step(stale, 0, "adapter")))
    gap = loop.difference(loop.samples(engine, 1), 1)
    print(f"{family}, adapters in {widest}: {gap:.1e} nats")
    assert gap < TOLERANCE
    assert loop.difference(stale, 2) > 100 * TOLERANCE
    record(family, "adapters", gap, served=True, scope=widest)
