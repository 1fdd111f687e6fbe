"""Distances to a teacher and their gradients, compared with their formulas in float64 NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from armature.components.configuration import load_recipe
from armature.components.contracts.episodes import Task
from armature.components.models.load import load_model
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rl.teacher import mixed, refuse_other_tokens, teachers_of
from armature.components.rollouts.batches.table import read_batch, sample_defect, write_batch
from armature.components.vlm.distillation import divergence
from armature.components.vlm.learner import Learner, Teacher
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.settings import Divergence, TeacherSettings
from tests.refusals import refused

from .conftest import model_settings, step, trainer_settings

FORWARD, REVERSE, JSD = {"name": "forward_kl"}, {"name": "reverse_kl"}, {"name": "jsd", "beta": 0.3}
LOSSES = [FORWARD, REVERSE, JSD]
V = 9


def softmax(logits: Any) -> Any:
    return np.exp(logits) / np.exp(logits).sum()


def formula(loss: dict[str, Any], p: Any, q: Any) -> float:
    """Compute the divergence of a teacher's probabilities p from a student's q, all outcomes positive."""
    if loss["name"] == "forward_kl":
        return float((p * np.log(p / q)).sum())
    if loss["name"] == "reverse_kl":
        return float((q * np.log(q / p)).sum())
    m = loss["beta"] * p + (1 - loss["beta"]) * q
    return float(loss["beta"] * (p * np.log(p / m)).sum() + (1 - loss["beta"]) * (q * np.log(q / m)).sum())


def coarse(probabilities: Any, ids: Any) -> Any:
    rest = 1 - probabilities[ids].sum()
    return np.array([*probabilities[ids], *([rest] if len(ids) < V else [])])


def ours(loss: dict[str, Any], logits: Any, teacher: Any, ids: Any) -> tuple[float, Any]:
    """Return the divergence and its gradient with respect to the student's logits."""
    z = torch.tensor(logits, requires_grad=True)
    q, p = z.log_softmax(-1)[ids], torch.tensor(teacher).log_softmax(-1)[ids]
    settings: Any = TypeAdapter(Divergence).validate_python(loss)
    value = divergence(q[None], p[None], settings)[0]
    value.backward()
    assert z.grad is not None
    return value.item(), z.grad.numpy()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
@pytest.mark.parametrize("k", [1, 4, V])
def test_divergence_of_a_biased_teacher_has_the_formulas_gradient(loss, k):
    """The teacher is the student with a known bias on its logits; the gradient is by central differences."""
    rng = np.random.default_rng(k)
    logits, bias = rng.normal(size=V), rng.normal(size=V)
    teacher = logits + bias
    ids = np.argsort(-teacher)[:k]

    def value(z: Any) -> float:
        return formula(loss, coarse(softmax(teacher), ids), coarse(softmax(z), ids))

    numeric = [(value(logits + step) - value(logits - step)) / 2e-6 for step in np.eye(V) * 1e-6]
    result, gradient = ours(loss, logits, teacher, ids)
    assert result == pytest.approx(value(logits), abs=1e-6)
    np.testing.assert_allclose(gradient, numeric, atol=1e-6)


def test_forward_kl_over_all_tokens_has_gradient_q_minus_p():
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=V), rng.normal(size=V)
    _, gradient = ours(FORWARD, logits, logits + bias, np.arange(V))
    np.testing.assert_allclose(gradient, softmax(logits) - softmax(logits + bias), atol=1e-6)


def test_reverse_kl_over_all_tokens_has_gradient_of_centered_log_ratio():
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=V), rng.normal(size=V)
    q, p = softmax(logits), softmax(logits + bias)
    expected = q * (np.log(q / p) - (q * np.log(q / p)).sum())
    np.testing.assert_allclose(ours(REVERSE, logits, logits + bias, np.arange(V))[1], expected, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
@pytest.mark.parametrize("k", [1, 4, V])
def test_divergence_of_equal_distributions_and_its_gradient_are_zero(loss, k):
    logits = np.random.default_rng(k).normal(size=V)
    value, gradient = ours(loss, logits, logits, np.argsort(-logits)[:k])
    assert abs(value) < 1e-12
    assert np.abs(gradient).max() < 1e-6


# --- A learner with a teacher ---


def teacher_settings(**changes: Any) -> TeacherSettings:
    return TeacherSettings.model_validate({"source": "tiny", "dtype": "float32"} | changes)


def with_teacher(tiny, teacher: Any = None, trainer: dict[str, Any] | None = None, **settings: Any) -> Learner:
    """Make a learner of the tiny checkpoint whose teacher is `teacher`, or the same checkpoint."""
    return Learner(
        tiny.model(),
        trainer_settings(**(trainer or {})),
        temperature=0.7,
        forbidden_token_ids=sorted(tiny.collator.forbidden_token_ids),
        teacher=Teacher(
            teacher_settings(**settings), {"": (teacher or load_model(tiny.folder, model_settings()), None)}
        ),
    )


def taught(learner: Learner, tiny, samples):
    load = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        return learner.teach(samples, load), learner.score(samples, load)


@pytest.fixture
def tiny(make_tiny):
    return make_tiny("qwen2-vl")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
def test_teacher_that_equals_the_student_gives_zero_loss_and_gradient(tiny, loss, packing):
    learner = with_teacher(tiny, loss=loss | {"likeliest": 5}, trainer={"packing": packing})
    samples, scores = taught(learner, tiny, tiny.samples(6, seed=1))
    for sample, score in zip(samples, scores, strict=True):
        assert sample.teacher.ids.shape == (sample.loss_mask.sum(), 5)
        np.testing.assert_allclose(sample.teacher.logprobs, score[sample.loss_mask], atol=1e-5)
    changed, _ = mixed(samples, learner.teacher.settings)
    metrics = step(learner, tiny, changed)
    assert abs(metrics["teacher/loss"]) < 1e-9
    assert metrics["loss"] == pytest.approx(0, abs=1e-9)
    assert metrics["grad_norm"] < 1e-5


def test_advantages_are_zero_if_the_teacher_is_the_sampler(tiny):
    learner = with_teacher(tiny)
    samples, scores = taught(learner, tiny, tiny.samples(4, seed=1))
    sampled = [replace(one, behavior_logprobs=score) for one, score in zip(samples, scores, strict=True)]
    changed, metrics = mixed(sampled, learner.teacher.settings)
    assert max(np.abs(sample.advantages).max() for sample in changed) < 1e-5
    assert abs(metrics["teacher/reverse_kl"]) < 1e-6


def test_advantages_mix_rewards_and_teacher_by_weight(tiny):
    learner = with_teacher(tiny, weight=0.25)
    samples, _ = taught(learner, tiny, tiny.samples(4, seed=1))
    changed, _ = mixed(samples, learner.teacher.settings)
    for before, after in zip(samples, changed, strict=True):
        mask = before.loss_mask
        gap = before.teacher.logprobs - before.behavior_logprobs[mask]
        np.testing.assert_allclose(after.advantages[mask], 0.75 * before.advantages[mask] + 0.25 * gap, rtol=1e-5)
        assert not after.advantages[~mask].any()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
@pytest.mark.parametrize("backend", ["normal", "torch"])
def test_step_descends_the_divergence_of_a_biased_teacher(tiny, loss, backend):
    """The gradient norm equals the one of a loss that is written with the model's own logits."""
    teacher = load_model(tiny.folder, model_settings())
    head = teacher.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.from_numpy(np.random.default_rng(0).normal(size=len(head.weight))).float())
    logprobs = {"name": backend} | ({"chunk_tokens": 16} if backend == "torch" else {})
    learner = with_teacher(tiny, teacher, {"logprobs": logprobs}, loss=loss | {"likeliest": 5}, weight=0.5)
    samples, _ = taught(learner, tiny, tiny.samples(4, seed=1, n_images=(0,)))
    samples = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in samples]

    model, losses = tiny.model(), []
    for parameter in model.parameters():
        parameter.grad = None
    forbidden = sorted(tiny.collator.forbidden_token_ids)
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(sample.input_ids).long()[None]).logits[0, :-1].double() / 0.7
        logits[:, [token for token in forbidden if token < logits.shape[1]]] = -1e30
        q = logits.log_softmax(-1)[torch.from_numpy(sample.loss_mask[1:])]
        biased = logits.detach() + head.bias.detach().double() / 0.7
        biased[:, [token for token in forbidden if token < logits.shape[1]]] = -1e30
        p = biased.log_softmax(-1)[torch.from_numpy(sample.loss_mask[1:])]
        ids = p.topk(5).indices
        assert ids.tolist() == sample.teacher.ids.tolist()
        p, q = (torch.cat([x.gather(1, ids).exp(), 1 - x.gather(1, ids).exp().sum(1, keepdim=True)], 1) for x in (p, q))
        losses += [*_torch_formula(loss, p, q)]
    expected = 0.5 * torch.stack(losses).mean()
    expected.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()

    metrics = step(learner, tiny, samples)
    assert metrics["teacher/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def _torch_formula(loss, p, q):
    if loss["name"] == "jsd":
        m = loss["beta"] * p + (1 - loss["beta"]) * q
        return loss["beta"] * (p * (p / m).log()).sum(1) + (1 - loss["beta"]) * (q * (q / m).log()).sum(1)
    return (p * (p / q).log()).sum(1) if loss["name"] == "forward_kl" else (q * (q / p).log()).sum(1)


def test_scores_are_columns_of_the_batch_table(tiny, tmp_path):
    learner = with_teacher(tiny, loss=FORWARD)
    samples, _ = taught(learner, tiny, tiny.samples(4, seed=1))
    samples.append(replace(samples[0], sample_id="without", teacher=None))
    write_batch(tmp_path, samples)
    for one, other in zip(samples, read_batch(tmp_path), strict=True):
        assert (one.teacher is None) == (other.teacher is None)
        for name in ("logprobs", "ids", "likeliest") if one.teacher else ():
            assert np.array_equal(getattr(one.teacher, name), getattr(other.teacher, name))


def test_sample_with_a_score_that_is_not_finite_has_a_defect(tiny):
    (sample,), _ = taught(with_teacher(tiny), tiny, tiny.samples(1, seed=1))
    assert sample_defect(sample) is None
    scores = replace(sample.teacher, logprobs=np.full_like(sample.teacher.logprobs, np.nan))
    defect = sample_defect(replace(sample, teacher=scores))
    assert defect is not None
    assert defect[0] == "teacher"


def test_teacher_with_more_rows_scores_only_the_students_tokens(tiny):
    teacher = load_model(tiny.folder, model_settings())
    head = teacher.get_output_embeddings()
    rows = len(head.weight)
    head.weight = torch.nn.Parameter(torch.cat([head.weight, 50 * torch.ones_like(head.weight[:3])]))
    (sample,), (score,) = taught(with_teacher(tiny, teacher, loss=FORWARD), tiny, tiny.samples(1, seed=1))
    assert sample.teacher.ids.max() < rows
    np.testing.assert_allclose(sample.teacher.logprobs, score[sample.loss_mask], atol=1e-5)


def test_each_kind_has_the_scores_of_its_own_teacher(tiny):
    other = load_model(tiny.folder, model_settings())
    head = other.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.from_numpy(np.random.default_rng(0).normal(size=len(head.weight))).float())
    settings = teacher_settings(source="", kinds={"same": {"source": "a"}, "other": {"source": "b"}}, loss=FORWARD)
    learner = Learner(
        tiny.model(),
        trainer_settings(),
        temperature=0.7,
        forbidden_token_ids=sorted(tiny.collator.forbidden_token_ids),
        teacher=Teacher(settings, {"same": (load_model(tiny.folder, model_settings()), None), "other": (other, None)}),
    )
    samples, load = tiny.samples(3, seed=1), MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        scored = {kind: learner.teach(samples, load, kind) for kind in settings.kinds}
        student = learner.score(samples, load)
    (alone,), _ = taught(with_teacher(tiny, other, loss=FORWARD), tiny, samples[:1])
    np.testing.assert_allclose(scored["other"][0].teacher.logprobs, alone.teacher.logprobs, atol=1e-5)
    for one, two, score in zip(scored["same"], scored["other"], student, strict=True):
        np.testing.assert_allclose(one.teacher.logprobs, score[one.loss_mask], atol=1e-5)
        assert np.abs(one.teacher.logprobs - two.teacher.logprobs).max() > 0.1


# --- The teacher of each kind of task ---

TASKS = [Task(f"t{number}", "train", {"color": color}) for number, color in enumerate(["red", "blue", "red"])]


def by_color(*kinds: str, **changes: Any) -> TeacherSettings:
    named = {kind: {"source": kind} for kind in kinds}
    return TeacherSettings.model_validate({"kinds": named, "kind_field": "color"} | changes)


def test_tasks_have_the_teacher_of_their_kind_or_the_one_of_all_others():
    assert teachers_of(TASKS, by_color("red", "blue")) == {"t0": "red", "t1": "blue", "t2": "red"}
    assert teachers_of(TASKS, by_color("red", source="all")) == {"t0": "red", "t1": "", "t2": "red"}
    assert teachers_of(TASKS, teacher_settings()) == {"t0": "", "t1": "", "t2": ""}


@pytest.mark.parametrize(
    ("settings", "code", "shown"),
    [
        (by_color("red"), "teacher_missing", "blue"),
        (by_color("red", "blue", "green"), "teacher_without_tasks", "teacher.kinds.green"),
        (by_color("gren", source="all"), "teacher_without_tasks", "teacher.kinds.gren"),
        (by_color("red", kind_field="hue"), "unknown_kind_field", "hue"),
    ],
)
def test_rejects_tasks_without_teacher_and_teachers_without_tasks(settings, code, shown):
    with refused(code, shown):
        teachers_of(TASKS, settings)


def test_kind_is_the_one_of_the_evaluation_unless_the_teacher_names_a_field():
    chosen = ("teacher.recipe=", "teacher.kinds.red.source=a")
    for more, field in (((), "color"), (("teacher.kind_field=hue",), "hue")):
        settings = load_recipe("train-vlm/colors-distilled", [*chosen, *more]).settings_for(TrainVLMSettings)
        assert settings.teacher.kind_field == field
    with refused("value_error", "teacher.kind_field"):
        load_recipe("train-vlm/colors-distilled", [*chosen, "evaluation.kind_field="])


# --- The proof of the same tokens and images ---


def test_equal_processors_are_accepted(make_tiny):
    refuse_other_tokens(make_tiny("qwen2-vl").collator, make_tiny("qwen2-vl").collator)


def test_rejects_teacher_with_another_vocabulary(make_tiny):
    with refused("teacher_tokens_differ", "teacher.source"):
        refuse_other_tokens(make_tiny("qwen2-vl").collator, make_tiny("llava").collator)


def test_rejects_teacher_with_other_image_inputs(make_tiny):
    from .conftest import open_tiny

    other = open_tiny(make_tiny("qwen2-vl").folder)
    other.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    with refused("teacher_inputs_differ", "pixel_values"):
        refuse_other_tokens(make_tiny("qwen2-vl").collator, other.collator)
    other = open_tiny(make_tiny("qwen2-vl").folder)
    other.processor.image_processor.merge_size = 1
    with refused("teacher_inputs_differ"):
        refuse_other_tokens(make_tiny("qwen2-vl").collator, other.collator)


def test_rejects_teacher_with_another_placeholder(make_tiny):
    from .conftest import open_tiny

    other = open_tiny(make_tiny("qwen2-vl").folder)
    other.collator.image_token_id = 0
    with refused("teacher_placeholders_differ", "image_token_id"):
        refuse_other_tokens(make_tiny("qwen2-vl").collator, other.collator)
