"""Chunks of actions as tokens: the FAST scheme (Pertsch et al., 2025) in its released file layout.

A chunk (T, D) in [-1, 1] becomes the orthonormal DCT-II of each dimension over time, times a scale, rounded. The T x D
integers, time first, minus the smallest one, are characters of a text, which a byte-level BPE shortens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes, regular
from armature.components.contracts.metrics import read_finite
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.batch import Floats

# The special tokens that an example is made of.


@dataclass(frozen=True)
class ActionVocabulary:
    """Token ids. `state` and `action` are the first of their runs; BOS is the tokenizer's, or its EOS."""

    image_start: int
    image_end: int
    image_patch: int
    image_column: int
    state_start: int
    state_end: int
    state: int
    action_start: int
    action_end: int
    action: int
    bos: int
    eos: int
    pad: int

    @classmethod
    def find(cls, tokenizer: Any, config: MolmoAct2Config) -> ActionVocabulary:
        """
        Args:
            tokenizer: A transformers fast tokenizer.

        Raises:
            DataError: a token is missing, or the checkpoint's configuration gives it another id.
        """
        known: dict[str, int] = tokenizer.get_vocab()
        expected = {
            "<im_start>": config.image_start_token_id,
            "<im_end>": config.image_end_token_id,
            "<im_patch>": config.image_patch_id,
            "<im_col>": config.image_col_id,
            "<state_start>": config.state_start_token_id,
            "<state_end>": config.state_end_token_id,
            "<state_0>": config.state_token_start_id,
            "<action_start>": config.action_start_token_id,
            "<action_end>": config.action_end_token_id,
            "<action_0>": config.action_token_start_id,
        }
        runs = (("state", config.num_state_tokens), ("action", config.num_action_tokens))
        last = {
            f"<{kind}_{count - 1}>": None if first is None else first + count - 1
            for kind, count in runs
            for first in [known.get(f"<{kind}_0>")]
        }
        for token, wanted in (expected | last).items():
            if known.get(token) is None or wanted not in (None, known[token]):
                raise DataError(
                    f"token {token} is {known.get(token)} in the tokenizer and {wanted} by the configuration",
                    code="special_token_mismatch",
                    where="tokenizer.json and config.json",
                    remedy="use the tokenizer that the checkpoint was saved with",
                )
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if eos is None or pad is None:
            raise DataError(
                f"the tokenizer has no {'end-of-text' if eos is None else 'padding'} token",
                code="special_token_missing",
                where="tokenizer_config.json",
                remedy="name eos_token and pad_token there, as the released checkpoint does",
            )
        bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return cls(
            image_start=known["<im_start>"],
            image_end=known["<im_end>"],
            image_patch=known["<im_patch>"],
            image_column=known["<im_col>"],
            state_start=known["<state_start>"],
            state_end=known["<state_end>"],
            state=known["<state_0>"],
            action_start=known["<action_start>"],
            action_end=known["<action_end>"],
            action=known["<action_0>"],
            bos=bos,
            eos=eos,
            pad=pad,
        )


TOKENIZER, TOKENIZER_CONFIG, CONFIG = "tokenizer.json", "tokenizer_config.json", "processor_config.json"
_CHARACTERS = 0x800  # of at most two bytes; far more than coefficients reach
_BROKEN = "\ufffd"

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class DecodedActions:
    """`actions` (T, D) as they were encoded, or what is wrong with the tokens."""

    actions: Floats | None
    error: str | None = None


@dataclass(frozen=True)
class ActionTokens:
    """scale, smallest: of the integers; smallest is `min_token` in the files."""

    tokenizer: Tokenizer
    scale: float
    smallest: int
    _sayable: Numbers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sayable", _sayable(self.tokenizer))

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @classmethod
    def fit(cls, chunks: Iterable[Floats], vocabulary: int, scale: float) -> ActionTokens:
        """Learns from normalized chunks (T, D). Every chunk of their length with values in [-1, 1] can be said.

        Raises:
            ConfigurationError: there are more different characters than tokens.
            DataError: there is no chunk.
        """
        integers = [_integers(chunk, scale) for chunk in chunks]
        if not integers:
            raise DataError("no chunks of actions to learn tokens from", code="chunks_missing")
        # By Parseval no coefficient of values in [-1, 1] exceeds the square root of their number.
        most = math.ceil(scale * math.sqrt(max(len(each) for each in integers)))
        smallest = min(-most, *(int(each.min()) for each in integers))
        largest = max(most, *(int(each.max()) for each in integers))
        alphabet = sorted(set(_as_bytes("".join(map(chr, range(largest - smallest + 1))))))
        if len(alphabet) > vocabulary:
            raise ConfigurationError(
                f"{vocabulary} action tokens are fewer than the {len(alphabet)} characters of the actions",
                code="too_few_action_tokens",
                remedy="allow more action tokens, or a smaller scale",
            )
        tokenizer = Tokenizer(models.BPE())
        # Whole chunks are learned from: split like text, coefficients that fall on spaces or letters would not merge.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, min_frequency=2, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((_text(each - smallest) for each in integers), trainer)
        return cls(tokenizer, scale, smallest)

    @classmethod
    def load(cls, folder: Path) -> ActionTokens:
        """
        Raises:
            DataError: a file is missing or cannot be read.
        """
        try:
            config = read_finite(read_bytes(folder / CONFIG))
            if not (scale := float(config["scale"])) > 0:
                raise ValueError(f"scale is {scale}, not above 0")
            return cls(Tokenizer.from_file(str(regular(folder / TOKENIZER))), scale, int(config.get("min_token", 0)))
        except Exception as error:  # tokenizers raises bare exceptions
            raise DataError(
                f"not an action tokenizer: {error}", code="invalid_action_tokenizer", where=str(folder)
            ) from error

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / TOKENIZER))
        _write(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
        _write(
            folder / CONFIG,
            {
                "processor_class": "UniversalActionProcessor",
                "scale": self.scale,
                "vocab_size": self.vocabulary,
                "min_token": self.smallest,
                "action_dim": None,
                "time_horizon": None,
            },
        )

    def encode(self, actions: Floats) -> list[int]:
        """Of (T, D). A coefficient that the tokens have no character for becomes the nearest that has one."""
        characters = np.maximum(_integers(actions, self.scale) - self.smallest, 0).ravel()
        after = np.minimum(np.searchsorted(self._sayable, characters), len(self._sayable) - 1)
        before = np.maximum(after - 1, 0)
        nearer = characters - self._sayable[before] < self._sayable[after] - characters
        characters = self._sayable[np.where(nearer, before, after)]
        ids: list[int] = self.tokenizer.encode(_text(characters), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], horizon: int, dimensions: int) -> DecodedActions:
        """The actions, in float32, or why there are none."""
        unknown = [one for one in ids if not 0 <= one < self.vocabulary]
        if unknown:
            return DecodedActions(None, f"action token {unknown[0]} of {self.vocabulary}")
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        if _BROKEN in text:
            return DecodedActions(None, "the action tokens are not whole characters")
        if len(text) != horizon * dimensions:
            return DecodedActions(None, f"{len(text)} coefficients, not {horizon} x {dimensions}")
        integers = np.array([ord(one) for one in text], np.float64).reshape(horizon, dimensions) + self.smallest
        return DecodedActions(idct(integers / self.scale, axis=0, norm="ortho").astype(np.float32))


def _integers(actions: Floats, scale: float) -> Numbers:
    """In float32, as the released code rounds; (T, D)."""
    return np.around(dct(np.asarray(actions, np.float32), axis=0, norm="ortho") * np.float32(scale)).astype(np.int64)


def _text(characters: Numbers) -> str:
    return "".join(map(chr, characters.ravel().tolist()))


def _as_bytes(text: str) -> str:
    """`text` as byte-level BPE sees it: a printable character for each byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def _sayable(tokenizer: Tokenizer) -> Numbers:
    """Characters, in order, whose bytes are all in the vocabulary; tokenizers drop the others without a word."""
    known = {token for token in tokenizer.get_vocab() if len(token) == 1}
    characters = [code for code in range(_CHARACTERS) if known.issuperset(_as_bytes(chr(code)))]
    if not characters:
        raise ConfigurationError("the action tokenizer has no characters", code="action_tokenizer_empty")
    return np.array(characters, np.int64)


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
