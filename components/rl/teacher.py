"""A run's teachers: the proof that they read tokens and images as the trained model does, the tasks of each, and
their part of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from armature.components.contracts.batches import Sample
from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.make import task_kind
from armature.components.models.adapters.collate import SampleCollator
from armature.components.vlm.settings import SampledReverseKL, TeacherSettings

SIZES = (64, 48), (120, 200)
"""Widths and heights of the images of the example that both processors render."""
WHERE = "teacher.source"
REMEDY = "choose a teacher of the trained model's family and version; it scores the very tokens and images"


def refuse_other_tokens(student: SampleCollator, teacher: SampleCollator) -> None:
    """Prove that a teacher's processor gives the tokens and the image inputs of the trained model's processor.

    Compared are the vocabularies, the ids of placeholders, and the outputs for a rendered example with two images.

    Raises:
        ConfigurationError: something differs.
    """
    ours, theirs = (each.processor.tokenizer.get_vocab() for each in (student, teacher))
    if others := sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)):
        first = others[0]
        raise ConfigurationError(
            f"the tokenizers differ in {len(others)} of {len(ours)} tokens: {first!r} has the id {ours.get(first)}, in "
            f"the teacher {theirs.get(first)}",
            code="teacher_tokens_differ",
            where=WHERE,
            remedy=REMEDY,
        )
    for name in ("image_token_id", "video_token_id", "forbidden_token_ids"):
        if (one := getattr(student, name)) != (other := getattr(teacher, name)):
            raise ConfigurationError(
                f"{name} is {_short(one)}, in the teacher {_short(other)}",
                code="teacher_placeholders_differ",
                where=WHERE,
                remedy=REMEDY,
            )
    content = [*({"type": "image"} for _ in SIZES), {"type": "text", "text": "Compare 12.5 apples.\n\n¿Qué más?"}]
    messages = [{"role": "user", "content": content}]
    text = student.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in SIZES]
    one, other = (
        each.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        for each in (student, teacher)
    )
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or not _equal(one[name], other[name]):
            shapes = [tuple(each[name].shape) if name in each else "missing" for each in (one, other)]
            raise ConfigurationError(
                f"{name} of an example, {shapes[0]}, differs from the teacher's, {shapes[1]}",
                code="teacher_inputs_differ",
                where=WHERE,
                remedy=REMEDY,
            )


def _equal(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else one == other


def _short(ids: Any) -> str:
    return str(sorted(ids)[:8] if isinstance(ids, frozenset) else ids)


def teachers_of(tasks: Sequence[Task], teacher: TeacherSettings) -> dict[str, str]:
    """Return the key in `teacher.models` of the teacher of each task, by task id.

    Raises:
        ConfigurationError: a task has no teacher, or a teacher no task.
    """
    if not teacher.kinds:
        return dict.fromkeys((task.task_id for task in tasks), "")
    kinds = {task.task_id: task_kind(task, teacher.kind_field) for task in tasks}
    if missing := sorted(set() if "" in teacher.models else set(kinds.values()) - teacher.kinds.keys()):
        raise ConfigurationError(
            f"tasks have no teacher whose {teacher.kind_field} is {', '.join(missing[:8])}",
            code="teacher_missing",
            where="teacher.kinds",
            remedy="name one for each kind, or set teacher.source or teacher.recipe for all others",
        )
    if unused := sorted(teacher.kinds.keys() - set(kinds.values())):
        raise ConfigurationError(
            f"no training task is of the kind {unused[0]!r} by the field {teacher.kind_field!r}",
            code="teacher_without_tasks",
            where=f"teacher.kinds.{unused[0]}",
            remedy=f"the kinds are {', '.join(sorted(set(kinds.values()))[:8])}",
        )
    return {task: kind if kind in teacher.kinds else "" for task, kind in kinds.items()}


def mixed(samples: Sequence[Sample], teacher: TeacherSettings) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples with advantages of rewards and teacher, and metrics of the teacher's scores.

    At a sampled token, with A its advantage by rewards, p its log-prob under the teacher and b under the sampler, the
    advantage is (1 - weight) A + weight (p - b), whose mean over samples is minus KL(sampler || teacher). With another
    loss than `sampled` the trainer adds the teacher's part, and the advantage is (1 - weight) A.
    """
    changed: list[Sample] = []
    gaps: list[npt.NDArray[np.float32]] = []
    share = teacher.weight if isinstance(teacher.loss, SampledReverseKL) else 0.0
    for sample in samples:
        assert sample.teacher is not None
        gap = sample.teacher.logprobs - sample.behavior_logprobs[sample.loss_mask]
        advantages = (1 - teacher.weight) * sample.advantages
        advantages[sample.loss_mask] += share * gap
        changed.append(replace(sample, advantages=advantages.astype(np.float32)))
        gaps.append(gap)
    return changed, {"teacher/reverse_kl": float(-np.concatenate(gaps).mean())}
