"""Direct preference optimization, compared with its formula in plain torch, and pairs of answers in users' forms."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.configuration import load_recipe
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.models.adapters import FamilyAdapter, model_inputs
from armature.components.rollouts.batches.table import write_batch
from armature.components.vlm.client import TrainerClient
from armature.components.vlm.sft.chats import chat_pair
from armature.components.vlm.sft.preferences import PreferenceLoss, dpo_trainer, samples_of_pairs
from armature.components.vlm.sft.settings import ConversationSettings, PairColumns
from tests.builders import make_machine, make_trajectory, make_turn
from tests.refusals import refused
from tests.vlm.conftest import LORA, Tiny, learner_of, step, trainer_settings

BETA = 0.7
DPO: dict[str, Any] = dpo_trainer(trainer_settings(), BETA).model_dump(include={"objective", "aggregation"})


def pairs_of(tiny: Tiny, pairs: int, seed: int = 1) -> list[Any]:
    """Return the samples of pairs with images, with random reference log-probs."""
    samples = tiny.samples(2 * pairs, seed=seed)
    signs = [1.0 - 2 * (row % 2) for row in range(len(samples))]
    return [
        replace(each, advantages=np.where(each.loss_mask, sign, 0).astype(np.float32))
        for each, sign in zip(samples, signs, strict=True)
    ]


def by_hand(tiny: Tiny, samples: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of the pairs and its gradients: every sequence alone, with the model's own logits."""
    model, sums = tiny.model(), []
    for sample in samples:
        batch = tiny.collator.collate([sample], tiny.images.open)
        logits = model(**model_inputs(batch)).logits[0, :-1].double()
        logits[:, [each for each in tiny.collator.forbidden_token_ids if each < logits.shape[1]]] = -1e30
        logprobs = logits.log_softmax(-1).gather(1, batch.input_ids[0, 1:, None])[:, 0]
        ratios = logprobs - torch.from_numpy(sample.behavior_logprobs[1:]).double()
        sums.append(ratios[torch.from_numpy(sample.loss_mask[1:])].sum())
    losses = [-torch.sigmoid(BETA * (sums[at] - sums[at + 1])).log() for at in range(0, len(sums), 2)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("packing", "rows", "tokens"),
    [(False, 64, 10_000), (False, 4, 150), (False, 1, 1), (True, 64, 10_000), (True, 2, 90)],
)
def test_step_has_the_formulas_loss_and_gradient(tiny, packing, rows, tokens):
    samples = pairs_of(tiny, 5)
    loss, gradients = by_hand(tiny, samples)
    learner = learner_of(
        tiny,
        **DPO,
        packing=packing,
        max_rows_per_micro_batch=rows,
        max_tokens_per_micro_batch=tokens,
        max_grad_norm=1e9,
        learning_rate=1e-30,
    )
    gradients_of_step: dict[str, torch.Tensor] = {}
    update = learner.update

    def recording(number: int) -> Any:
        gradients_of_step.update(
            {name: each.grad.clone() for name, each in learner.model.named_parameters() if each.grad is not None}
        )
        return update(number)

    learner.update = recording  # type: ignore[method-assign]
    metrics = step(learner, tiny, samples)
    norm = torch.stack([each.norm() for each in gradients.values()]).norm().item()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert gradients_of_step.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_of_step[name], gradient, rtol=1e-3, atol=1e-5 * norm)


# --- Rows ---

USER, OTHER = {"role": "user", "content": "Which color?"}, {"role": "user", "content": "Which?"}
RED, BLUE = ({"role": "assistant", "content": each} for each in ("red", "blue"))
AGAIN = [RED, {"role": "user", "content": "Sure?"}]


def pair(**row: Any) -> tuple[Any, Any]:
    return chat_pair(row, ConversationSettings(source="pairs.jsonl"), PairColumns())


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [RED], "rejected": [BLUE]},
        {"chosen": [USER, RED], "rejected": [USER, BLUE]},
        {"prompt": "Which color?", "chosen": [USER, RED], "rejected": [USER, BLUE]},
        {name: json.dumps(each) for name, each in (("prompt", [USER]), ("chosen", [RED]), ("rejected", [BLUE]))},
    ],
    ids=["prompt", "whole conversations", "prompt as text", "JSON text"],
)
def test_forms_of_a_pair_are_the_same_pair(row):
    chosen, rejected = pair(**row)
    assert [[each.content for each in one.messages] for one in (chosen, rejected)] == [
        [("Which color?",), ("red",)],
        [("Which color?",), ("blue",)],
    ]
    assert chosen.since == rejected.since == 1 and chosen.key == rejected.key


def test_answers_that_go_on_are_compared_from_their_first_difference():
    chosen, rejected = pair(prompt=[USER], chosen=[*AGAIN, RED], rejected=[*AGAIN, BLUE])
    assert chosen.since == 3
    chosen, rejected = pair(prompt=[USER], chosen=[RED], rejected=[BLUE, OTHER, RED])
    assert chosen.since == 1 and len(rejected.messages) == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [USER], "chosen": [RED], "rejected": [RED]}, "equal_answers"),
        ({"chosen": [USER, RED], "rejected": [OTHER, BLUE]}, "no_prompt"),
        ({"chosen": [RED], "rejected": [BLUE]}, "no_prompt"),
        ({"prompt": [USER], "chosen": [RED], "rejected": [{"role": "assistant", "content": " "}]}, "no_answer"),
        ({"prompt": [USER], "chosen": [*AGAIN, RED], "rejected": [RED]}, "no_answer"),
        ({"prompt": [USER], "chosen": [*AGAIN, RED], "rejected": [RED, OTHER, RED]}, "no_answer"),
        ({"prompt": [USER], "chosen": [RED]}, "bad_conversation"),
        ({"prompt": [USER], "chosen": [RED], "rejected": "blue"}, "bad_conversation"),
    ],
    ids=["equal", "other prompt", "no prompt", "empty", "shorter", "other question", "missing", "text"],
)
def test_rows_that_are_not_pairs_are_left_out(row, reason):
    with pytest.raises(BadRow) as left_out:
        pair(**row)
    assert left_out.value.reason == reason


def test_pairs_with_an_answer_that_cannot_be_trained_on_are_dropped_whole(tiny):
    adapter = FamilyAdapter(tiny.collator, tiny.images.open, max_tokens=6)

    def both(group: str, *lengths: int) -> list[Any]:
        ends = zip(("rejected", "chosen"), lengths, strict=True)
        return [make_trajectory(f"{group}-{end}", group, [turn(length)]) for end, length in ends]

    def turn(length: int) -> Any:
        ids = {"prompt_token_ids": [100, 101], "completion_token_ids": [102] * length}
        return make_turn(**ids, completion_logprobs=[0.0] * length)

    outputs = GenerateOutputs([*both("a", 2, 3), *both("b", 2, 9), *both("c", 8, 9), *both("d", 1, 2)])
    samples, drops = samples_of_pairs(outputs, adapter)
    assert [each.trajectory_id for each in samples] == ["a-chosen", "a-rejected", "d-chosen", "d-rejected"]
    assert [set(each.advantages[each.loss_mask]) for each in samples] == [{1.0}, {-1.0}] * 2
    assert drops == {"too_long": 2}


def test_recipe_needs_pairs_and_dpo_together(tmp_path):
    for changes in (["dpo.beta=0.2"], ["data.pairs={}"]):
        with refused("pairs_without_dpo"):
            load_recipe("sft/colors", changes)


# --- Training ---


@pytest.mark.slow
def test_references_are_those_of_the_initial_model_after_a_resume(tiny, tmp_path):
    """Rewards of a resumed run continue from the same references, although its weights have changed."""
    train, heldout = pairs_of(tiny, 4), pairs_of(tiny, 2, seed=2)
    heldout = [replace(each, sample_id=f"h{each.sample_id}") for each in heldout]
    batch, machine = tmp_path / "batch", make_machine(threads=1, loader_workers=0)
    batch.mkdir()
    policy = tiny.policy(model={"lora": LORA}, **DPO, learning_rate=1e-2)

    def loss_of(trainer: TrainerClient) -> PreferenceLoss:
        return PreferenceLoss(trainer, tmp_path, train, heldout, BETA, 3)

    with TrainerClient(policy, machine, tmp_path / "trainer") as trainer:
        loss = loss_of(trainer)
        loss.begin(batch)
        before = loss.evaluate(batch)
        first = loss.step(1, train, batch)
        after = loss.evaluate(batch)
        resumed = loss_of(trainer)
        assert resumed.evaluate(batch) == after
        second = resumed.step(2, train, batch)
        write_batch(batch, train)
        scores = trainer.score(batch)
    assert before["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert second["loss"] < first["loss"] and second["reward_margin"] > 0.01
    assert second["reward_margin"] == pytest.approx(second["reward_chosen"] - second["reward_rejected"])
    assert len(scores) == len(train) and after["loss"] != before["loss"]
