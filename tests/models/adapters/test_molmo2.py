"""Special features of Molmo2's batches: indices into patches, type ids, and token ids beyond the output head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from armature.components.families.family import FAMILIES
from armature.components.models.adapters import get_adapter, model_inputs, validate_batch
from armature.components.vlm.logprobs import Policy, predicting

from .conftest import build, outputs_of, says

MODES = ("bidirectional", "causal")
SIZES = ((100, 80), (64, 150), (230, 230))


@pytest.fixture(scope="module", params=MODES)
def molmo2(request, tmp_path_factory) -> Any:
    """A tiny Molmo2, once with each kind of image attention. The weights are always the same."""
    return build("molmo2", tmp_path_factory.mktemp("molmo2") / request.param, request.param)


@pytest.fixture
def outputs(molmo2) -> Any:
    """Return rollouts of one turn each. The turns have zero, one and three images."""
    a, b, c = (molmo2.image(*size) for size in SIZES)
    return outputs_of(
        [molmo2.turn([says("Name a color.")], [], "red")],
        [molmo2.turn([says(None, "What color is this?")], [a], "green it is")],
        [molmo2.turn([says("First", None, "then", None, None, "which?")], [c, a, b], "blue")],
    )


def _policy(molmo2: Any, backend: str = "normal") -> Policy:
    forbidden = sorted(molmo2.collator.forbidden_token_ids)
    return Policy(molmo2.model, logprobs=backend, temperature=0.7, chunk_tokens=4, forbidden_token_ids=forbidden)


def _logprobs(policy: Policy, batch: Any) -> list[torch.Tensor]:
    """Return the log-probs of the trained tokens, one tensor for each row."""
    values, _ = policy(model_inputs(batch), predicting(batch.loss_mask))
    return list(values.split(batch.loss_mask.sum(1).tolist()))


@pytest.mark.parametrize("backend", ("normal", "torch"))
def test_molmo2_rows_in_a_batch_equal_single_rows(molmo2, outputs, backend):
    """Ids of image tokens lie beyond the output head, so looking one up would fail."""
    samples, drops = molmo2.adapter.samples(outputs)
    assert not drops
    batch = validate_batch(molmo2.collate(samples))
    rows = molmo2.model.get_output_embeddings().weight.shape[0]
    assert batch.input_ids.max() >= rows > batch.input_ids[batch.loss_mask].max()
    policy = _policy(molmo2, backend)
    gradients: list[dict[str, torch.Tensor]] = []
    together = _gradients(policy, batch, gradients)
    alone = [one for sample in samples for one in _gradients(policy, molmo2.collate([sample]), gradients)]
    for mine, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    for name, gradient in gradients[0].items():
        total = sum(one[name] for one in gradients[1:] if name in one)
        assert torch.is_tensor(total)
        scale = max(1.0, float(total.abs().max()))
        torch.testing.assert_close(gradient / scale, total / scale, atol=1e-5, rtol=0)
    assert any("vision_tower" in name and gradient.any() for name, gradient in gradients[0].items())


def _gradients(policy: Policy, batch: Any, collected: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    policy.zero_grad()
    logprobs = _logprobs(policy, batch)
    torch.cat(logprobs).sum().backward()
    collected.append({name: one.grad.clone() for name, one in policy.named_parameters() if one.grad is not None})
    policy.zero_grad()
    return [one.detach() for one in logprobs]


def test_joined_pooling_indices_equal_one_processor_call(molmo2):
    refs = [molmo2.image(*size) for size in (*SIZES, SIZES[0])]
    features = [molmo2.collator.process_image(molmo2.images[ref]) for ref in refs]
    images = [molmo2.images[ref] for ref in refs]
    at_once = molmo2.processor(images=images, text=["<|image|>" * len(refs)], return_tensors="pt")
    joined = molmo2.collator.join(features)
    assert joined.keys() == at_once.keys() - {"input_ids", "attention_mask", "mm_token_type_ids"}
    for name, value in joined.items():
        assert torch.equal(value, at_once[name]), name
    naive = torch.cat([one["image_token_pooling"] for one in features])
    assert not torch.equal(joined["image_token_pooling"], naive)
    assert (naive < 0).sum() == (joined["image_token_pooling"] < 0).sum()


def test_changed_image_affects_only_its_row(molmo2, outputs):
    samples, _ = molmo2.adapter.samples(outputs)
    policy = _policy(molmo2)
    red = molmo2.image(*SIZES[0], seed=9)
    molmo2.images[red] = Image.new("RGB", SIZES[0], "red")
    other = replace(samples[1], images=(red,))
    with torch.no_grad():
        before = _logprobs(policy, molmo2.collate(samples))
        after = _logprobs(policy, molmo2.collate([samples[0], other, samples[2]]))
    changes = [float((mine - theirs).abs().max()) for mine, theirs in zip(before, after, strict=True)]
    assert changes[1] > 1e-3
    assert max(changes[0], changes[2]) < 1e-5


def test_type_ids_mark_the_eight_image_tokens(molmo2, outputs):
    """Type ids cover whole sequences, completions included; a shift by one would mark wrong tokens."""
    adapter = get_adapter("molmo2", molmo2.processor, molmo2.images.__getitem__)  # by family name, without a checkpoint
    samples, _ = adapter.samples(outputs)
    batch = adapter.collator.collate(samples, molmo2.images.__getitem__)
    marks = batch.extra_model_kwargs["mm_token_type_ids"]
    names = [token for token in FAMILIES["molmo2"].image_tokens if not token.startswith("<|")]
    assert len(names) == 8
    special = torch.tensor(molmo2.processor.tokenizer.convert_tokens_to_ids(names))
    assert torch.equal(marks == 1, torch.isin(batch.input_ids, special) & batch.attention_mask.bool())
    assert not marks[batch.loss_mask].any()


def test_training_mode_gives_the_same_logits(molmo2, outputs):
    samples, _ = molmo2.adapter.samples(outputs)
    try:
        for chosen in (samples, samples[:1]):
            batch = molmo2.collate(chosen)
            with torch.no_grad():
                trained = molmo2.model.train()(**model_inputs(batch)).logits
                evaluated = molmo2.model.eval()(**model_inputs(batch)).logits
            tokens = batch.attention_mask.bool()
            torch.testing.assert_close(trained[tokens], evaluated[tokens], atol=1e-5, rtol=0)
    finally:
        molmo2.model.eval()


def test_too_long_row_is_dropped_whole(molmo2, outputs):
    lengths = [
        len(turn.prompt_token_ids) + len(turn.completion_token_ids)
        for trajectory in outputs.trajectories
        for turn in trajectory.turns
    ]
    for limit in (lengths[0], lengths[1] - 1, lengths[1], lengths[2] - 1, lengths[2]):
        adapter = get_adapter(molmo2.folder, molmo2.processor, molmo2.images.__getitem__, limit)
        samples, drops = adapter.samples(outputs)
        assert [len(sample.input_ids) for sample in samples] == [length for length in lengths if length <= limit]
        assert drops["too_long"] == sum(length > limit for length in lengths)
        for sample in samples:
            features = [adapter.collator.process_image(molmo2.images[ref]) for ref in sample.images]
            needed = sum(int(one["placeholder_runs"].sum()) for one in features)
            assert (sample.input_ids == adapter.collator.image_token_id).sum() == needed
