from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from armature.components.models.blockwise import FP8Linear, quantize_rows
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy, save_policy
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.player import open_flow_policy
from tests.refusals import refused
from tests.robots.policies.molmoact2 import released

SEEDS = [5, 2**62 + 11, 5, 0, 77]


OBSERVATIONS = [released.observe(number) for number in range(5)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return load_policy(released.write_released(tmp_path_factory.mktemp("released") / "checkpoint"), released.KITCHEN)


@pytest.fixture(scope="module")
def policy(loaded: LoadedPolicy) -> MolmoAct2Policy:
    return MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=4)


def test_predictions_are_chunks_in_the_datasets_units(policy: MolmoAct2Policy) -> None:
    actions = policy.predict(OBSERVATIONS, SEEDS)
    assert (policy.n_action_steps, policy.action_dimensions) == (3, 7)
    assert actions.shape == (5, 3, 7) and actions.dtype == np.float32
    stats = released.norm_stats()["metadata_by_tag"]["kitchen"]["action_stats"]
    assert (actions >= np.float32(stats["q01"]) - 1e-6).all() and (actions <= np.float32(stats["q99"]) + 1e-6).all()
    assert policy.facts()["norm_tag"] == "kitchen"
    assert policy.cameras == released.CAMERAS


def test_row_depends_only_on_its_observation_and_seed(policy: MolmoAct2Policy) -> None:
    together = policy.predict(OBSERVATIONS, SEEDS)
    order = [3, 0, 4, 2, 1]
    shuffled = policy.predict([OBSERVATIONS[i] for i in order], [SEEDS[i] for i in order])
    assert [together[i].tobytes() for i in order] == [row.tobytes() for row in shuffled]
    for row, observation, seed in zip(together, OBSERVATIONS, SEEDS, strict=True):
        assert policy.predict([observation], [seed])[0].tobytes() == row.tobytes()
    assert policy.predict(OBSERVATIONS[:1], [6])[0].tobytes() != together[0].tobytes()
    assert policy.predict(OBSERVATIONS[2:3], [SEEDS[0]])[0].tobytes() != together[0].tobytes()


def test_prepared_observations_are_not_encoded_again(policy: MolmoAct2Policy) -> None:
    prepared = [policy.prepared(observation) for observation in OBSERVATIONS]
    assert [each.images for each in prepared] == [each.images for each in OBSERVATIONS]
    blind = [replace(each, images={}) for each in prepared]
    mixed = [*blind[:2], *OBSERVATIONS[2:4], blind[4]]
    expected = policy.sample_flow_sde(OBSERVATIONS, SEEDS, 0.5)
    for chunk, wanted in zip(policy.sample_flow_sde(mixed, SEEDS, 0.5), expected, strict=True):
        assert chunk.actions.tobytes() == wanted.actions.tobytes()
        assert chunk.logprobs.tobytes() == wanted.logprobs.tobytes()
    assert policy.predict(mixed, SEEDS).tobytes() == policy.predict(OBSERVATIONS, SEEDS).tobytes()


def test_open_policy_uses_saved_or_changed_settings(loaded: LoadedPolicy, tmp_path: Path) -> None:
    save_policy(tmp_path / "checkpoint", loaded.parts, loaded.model.state_dict())
    opened = open_flow_policy(tmp_path, "continuous", rows=1)
    expected = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)
    two = (OBSERVATIONS[:2], SEEDS[:2])
    if not torch.cuda.is_available():  # open_flow_policy uses a GPU if there is one
        assert opened.predict(*two).tobytes() == expected.predict(*two).tobytes()
    short = open_flow_policy(tmp_path, "continuous", rows=1, n_action_steps=2)
    assert short.predict(*two).tobytes() == opened.predict(*two)[:, :2].tobytes()
    fewer = open_flow_policy(tmp_path, "continuous", rows=1, num_inference_steps=3)
    assert fewer.predict(*two).tobytes() != opened.predict(*two).tobytes()
    assert open_flow_policy(tmp_path, "continuous", rows=1, num_inference_steps=10).predict(*two).tobytes() == (
        opened.predict(*two).tobytes()
    )


def test_fp8_quantization_follows_loaded_weights(loaded: LoadedPolicy, tmp_path: Path) -> None:
    settings = loaded.settings.model_copy(update={"dtype": "bfloat16"})
    weights = loaded.model.state_dict()
    moved = {name: value + 0.01 if "language_model" in name else value for name, value in weights.items()}
    for folder, each in (("first", weights), ("moved", moved)):
        save_policy(tmp_path / folder / "checkpoint", replace(loaded.parts, settings=settings), each)
    policy = open_flow_policy(tmp_path / "first", "continuous", rows=1, quantization="fp8")
    layers = [layer for layer in policy._sampler.model.modules() if isinstance(layer, FP8Linear)]
    assert len(layers) == 7 * loaded.config.text_config.num_hidden_layers and policy.facts()["quantization"] == "fp8"
    before = policy.predict(OBSERVATIONS[:1], SEEDS[:1])
    plain = open_flow_policy(tmp_path / "first", "continuous", rows=1)
    assert plain.predict(OBSERVATIONS[:1], SEEDS[:1]).tobytes() != before.tobytes()
    policy.load_weights(tmp_path / "moved/checkpoint")
    for layer in layers:
        assert torch.equal(layer.codes.float(), quantize_rows(layer.weight)[0].float())
    fresh = open_flow_policy(tmp_path / "moved", "continuous", rows=1, quantization="fp8")
    after = policy.predict(OBSERVATIONS[:1], SEEDS[:1])
    assert after.tobytes() == fresh.predict(OBSERVATIONS[:1], SEEDS[:1]).tobytes() != before.tobytes()


def test_rejects_untrained_action_mode_and_too_many_steps(loaded: LoadedPolicy, tmp_path: Path) -> None:
    save_policy(tmp_path / "checkpoint", loaded.parts, loaded.model.state_dict())
    with refused("action_mode_mismatch", "continuous", "discrete"):
        open_flow_policy(tmp_path, "discrete", rows=1)
    with refused("chunk_too_short", 5, 4):
        open_flow_policy(tmp_path, "continuous", rows=1, n_action_steps=5)


def speaking(
    loaded: LoadedPolicy, tokens: ActionTokens, answer: list[int], refuse_undecoded: bool = False
) -> MolmoAct2Policy:
    """Return a policy that generates the tokens `answer`. Its layers add nothing to the embeddings, so the next token
    depends only on the previous one."""
    settings = loaded.settings.model_copy(update={"action_mode": "both"})
    parts = replace(loaded.parts, settings=settings, action_tokens=tokens)
    model = copy.deepcopy(loaded.model)
    tokens_of_chunk = [
        "<action_output>",
        "<action_start>",
        *(f"<action_{token}>" for token in answer),
        "<action_end>",
        "<|im_end|>",
    ]
    ids = [released.TOKENS[token] for token in tokens_of_chunk]
    assert len(set(ids)) == len(ids) <= released.HIDDEN
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if (name.startswith("vlm.model.language_model") and "norm" not in name) or name == "vlm.lm_head.weight":
                weights.zero_()
        model.vlm.model.language_model.norm.weight.fill_(1.0)
        for place, (before, after) in enumerate(itertools.pairwise(ids)):
            model.vlm.model.language_model.embed_tokens.embedding[before, place] = 1.0
            model.vlm.lm_head.weight[after, place] = 1.0
    return MolmoAct2Policy(model, parts.processor(), settings, "discrete", 1, refuse_undecoded)


def test_action_tokens_are_decoded_and_invalid_ones_counted(loaded: LoadedPolicy) -> None:
    level = np.linspace(-0.9, 0.9, 7, dtype=np.float32)
    chunk = np.tile(level, (4, 1))
    tokens = ActionTokens.fit([chunk] * 4, vocabulary=released.ACTIONS, scale=10.0)
    tokens_of_chunk = tokens.encode(chunk)
    policy = speaking(loaded, tokens, tokens_of_chunk)
    actions = policy.predict(OBSERVATIONS[:2], SEEDS[:2])
    stats = released.norm_stats()["metadata_by_tag"]["kitchen"]["action_stats"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    coefficients = np.rint(10 * 2 * level.astype(np.float64))  # first DCT coefficient of a constant over 4 steps
    expected = low + (coefficients / 20 + 1) * (high - low) / 2
    np.testing.assert_allclose(actions, np.broadcast_to(expected, (2, 3, 7)), atol=1e-5)
    assert policy.undecoded == 0
    mute = speaking(loaded, tokens, tokens_of_chunk[:-1])
    np.testing.assert_allclose(mute.predict(OBSERVATIONS[:2], SEEDS[:2])[1, 0], (low + high) / 2, atol=1e-5)
    assert mute.undecoded == mute.facts()["undecoded_answers"] == 2
    with refused("undecodable_actions", "4 x 7"):
        speaking(loaded, tokens, tokens_of_chunk[:-1], refuse_undecoded=True).predict(OBSERVATIONS[:1], SEEDS[:1])
