"""Action tokens, compared with the plain formula of the cosine transform."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from tokenizers.trainers import BpeTrainer

from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from tests.refusals import refused

HORIZON, DIMENSIONS, SCALE = 10, 7, 10.0


def chunks(count: int, seed: int = 0) -> list[np.ndarray]:
    """Return smooth chunks like a robot's motion, with a gripper that switches."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, HORIZON)[:, None]
    made = []
    for _ in range(count):
        chunk = np.sin(rng.uniform(0, 6, DIMENSIONS) + time * rng.uniform(-3, 3, DIMENSIONS)) * rng.uniform(0, 1)
        chunk[:, -1] = np.where(time[:, 0] < rng.uniform(), -1, 1)
        made.append(chunk.astype(np.float32))
    return made


def transform(chunk: np.ndarray) -> np.ndarray:
    """Return the orthonormal DCT-II over time."""
    horizon = len(chunk)
    basis = np.array(
        [[math.cos(math.pi * (n + 0.5) * k / horizon) for n in range(horizon)] for k in range(horizon)]
    ) * np.sqrt(2 / horizon)
    basis[0] /= math.sqrt(2)
    return basis @ chunk.astype(np.float64)


@pytest.fixture(scope="module")
def fitted() -> ActionTokens:
    return ActionTokens.fit(chunks(200), vocabulary=300, scale=SCALE)


def test_tokens_are_the_rounded_cosine_transform(fitted: ActionTokens) -> None:
    for chunk in chunks(20, seed=1):
        text = fitted.tokenizer.decode(fitted.encode(chunk), skip_special_tokens=False)
        integers = np.array([ord(one) for one in text]).reshape(HORIZON, DIMENSIONS) + fitted.smallest
        exact = transform(chunk) * SCALE
        assert np.abs(integers - exact).max() <= 0.5 + 1e-4


def test_decoding_error_is_at_most_the_rounding_error(fitted: ActionTokens) -> None:
    for chunk in chunks(20, seed=2):
        decoded = fitted.decode(fitted.encode(chunk), HORIZON, DIMENSIONS)
        assert decoded.error is None and decoded.actions is not None and decoded.actions.dtype == np.float32
        # The transform preserves norms, so the error equals the coefficients' rounding errors, half a step each.
        error = np.linalg.norm(decoded.actions - chunk, axis=0)
        assert error.max() <= 0.5 / SCALE * math.sqrt(HORIZON) + 1e-5


def test_merges_shorten_chunks_like_the_training_data(fitted: ActionTokens) -> None:
    lengths = [len(fitted.encode(chunk)) for chunk in chunks(50, seed=3)]
    assert np.mean(lengths) < 0.6 * HORIZON * DIMENSIONS
    assert fitted.vocabulary <= 300


@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_every_chunk_in_range_can_be_encoded(fitted: ActionTokens, value: float) -> None:
    rng = np.random.default_rng(4)
    for chunk in (np.full((HORIZON, DIMENSIONS), value), rng.choice([-1.0, 1.0], (HORIZON, DIMENSIONS))):
        decoded = fitted.decode(fitted.encode(chunk.astype(np.float32)), HORIZON, DIMENSIONS)
        assert decoded.actions is not None
        assert np.abs(decoded.actions - chunk).max() <= 0.5 / SCALE * math.sqrt(HORIZON) + 1e-5


def test_saved_tokenizer_encodes_the_same(fitted: ActionTokens, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    loaded = ActionTokens.load(tmp_path)
    for chunk in chunks(5, seed=5):
        assert loaded.encode(chunk) == fitted.encode(chunk)
    config = json.loads((tmp_path / "processor_config.json").read_text())
    assert config["scale"] == SCALE and config["min_token"] == fitted.smallest
    assert config["vocab_size"] == fitted.vocabulary


def test_fitting_is_deterministic(fitted: ActionTokens, tmp_path: Path) -> None:
    fitted.save(tmp_path / "one")
    ActionTokens.fit(chunks(200), vocabulary=300, scale=SCALE).save(tmp_path / "two")
    for name in ("tokenizer.json", "processor_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> ActionTokens:
    """Return a tokenizer in the released layout whose alphabet has only 20 characters, which stand for coefficients
    from -10 to 9."""
    folder = tmp_path_factory.mktemp("fast")
    model = ByteLevelBPETokenizer()
    texts = ["".join(map(chr, np.random.default_rng(0).integers(0, 20, 40))) for _ in range(50)]
    model._tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=64, show_progress=False))
    model._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "processor_config.json").write_text(json.dumps({"scale": 10, "vocab_size": 64, "min_token": -10}))
    return ActionTokens.load(folder)


def test_coefficients_without_a_character_move_to_the_nearest(narrow: ActionTokens) -> None:
    chunk = np.zeros((4, 2), np.float32)
    chunk[:, 0], chunk[:, 1] = 1.0, -1.0  # first coefficients 20 and -20
    decoded = narrow.decode(narrow.encode(chunk), 4, 2)
    assert decoded.actions is not None
    assert np.allclose(decoded.actions, [[9 / 20, -10 / 20]] * 4, atol=1e-6)


def test_invalid_tokens_return_an_error(fitted: ActionTokens) -> None:
    good = fitted.encode(chunks(1)[0])
    for ids, shown in (
        (good[:-1], "10 x 7"),
        ([], "0"),
        ([*good, fitted.vocabulary], f"action token {fitted.vocabulary} does not exist"),
        ([-1], "-1"),
    ):
        decoded = fitted.decode(ids, HORIZON, DIMENSIONS)
        assert decoded.actions is None and decoded.error is not None and shown in decoded.error


def test_tokens_of_half_a_character_return_an_error() -> None:
    wide = ActionTokens.fit([np.full((2, 1), 20, np.float32), np.full((2, 1), -20, np.float32)], 400, SCALE)
    first_byte = wide.tokenizer.encode(chr(0xE9)).ids[:1]
    assert wide.decode(first_byte, 1, 1).actions is None


def test_rejects_missing_files_small_vocabulary_and_no_chunks(tmp_path: Path) -> None:
    with refused("invalid_action_tokenizer", tmp_path):
        ActionTokens.load(tmp_path)
    with refused("too_few_action_tokens", 8):
        ActionTokens.fit(chunks(3), vocabulary=8, scale=SCALE)
    with refused("chunks_missing"):
        ActionTokens.fit([], vocabulary=300, scale=SCALE)
