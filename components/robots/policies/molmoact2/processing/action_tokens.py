"""Encode chunks of actions as tokens and decode them: FAST (Pertsch et al., 2025) in its released file layout.

Each dimension of a chunk (T, D) in [-1, 1] goes through an orthonormal DCT-II over time, is multiplied by a scale and
rounded. The smallest integer is subtracted from the T x D integers, which are then written, time first, as characters
of a text. A byte-level BPE tokenizer turns this text into tokens.
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

# --- Special tokens of the language model's tokenizer ---

SPECIAL_TOKENS = {
    "image_start": ("<im_start>", "image_start_token_id"),
    "image_end": ("<im_end>", "image_end_token_id"),
    "image_patch": ("<im_patch>", "image_patch_id"),
    "image_column": ("<im_col>", "image_col_id"),
    "state_start": ("<state_start>", "state_start_token_id"),
    "state_end": ("<state_end>", "state_end_token_id"),
    "state": ("<state_0>", "state_token_start_id"),
    "action_start": ("<action_start>", "action_start_token_id"),
    "action_end": ("<action_end>", "action_end_token_id"),
    "action": ("<action_0>", "action_token_start_id"),
}
"""Text of each special token, and the field of config.json that holds its id.

`ActionVocabulary` checks that the tokenizer and config.json agree on the id.
"""


@dataclass(frozen=True)
class ActionVocabulary:
    """Ids of the special tokens in an example.

    `state` and `action` are the ids of <state_0> and <action_0>; the other state and action tokens follow. `bos` is the
    tokenizer's EOS if the tokenizer has no BOS.
    """

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

    @property
    def image(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images."""
        return self.image_start, self.image_end, self.image_patch, self.image_column

    @classmethod
    def find(cls, tokenizer: Any, config: MolmoAct2Config) -> ActionVocabulary:
        """Read the ids from a transformers fast tokenizer and check them against the checkpoint's configuration.

        Raises:
            DataError: the tokenizer lacks a token, or the configuration gives it another id.
        """
        ids: dict[str, int] = tokenizer.get_vocab()
        expected = {token: getattr(config, field) for token, field in SPECIAL_TOKENS.values()}
        for kind, count in (("state", config.num_state_tokens), ("action", config.num_action_tokens)):
            first = ids.get(f"<{kind}_0>")
            expected[f"<{kind}_{count - 1}>"] = None if first is None else first + count - 1
        for token, configured in expected.items():
            if ids.get(token) is None or configured not in (None, ids[token]):
                raise DataError(
                    f"token {token} has the id {ids.get(token)} in the tokenizer and {configured} in the configuration",
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
                remedy="set eos_token and pad_token there, as in the released checkpoint",
            )
        bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return cls(**{name: ids[token] for name, (token, _) in SPECIAL_TOKENS.items()}, bos=bos, eos=eos, pad=pad)


# --- The action tokenizer ---

TOKENIZER, TOKENIZER_CONFIG, CONFIG = "tokenizer.json", "tokenizer_config.json", "processor_config.json"
_CHARACTERS = 0x800  # characters of at most two UTF-8 bytes; coefficients need far fewer
_REPLACEMENT = "\ufffd"  # a byte-level decoder writes it for bytes that are not valid UTF-8

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class DecodedActions:
    """Normalized actions (T, D) decoded from tokens; None if the tokens are invalid, with the reason in `error`."""

    actions: Floats | None
    error: str | None = None


@dataclass(frozen=True)
class ActionTokens:
    """A FAST tokenizer of action chunks.

    scale: factor of the DCT coefficients before rounding. smallest: the integer that becomes character 0; `min_token`
    in the files.

    Example:
        >>> chunk = np.linspace([-1, 0], [1, 0.5], 8, dtype=np.float32)
        >>> tokens = ActionTokens.fit([chunk], vocabulary=256, scale=10.0)
        >>> restored = tokens.decode(tokens.encode(chunk), horizon=8, dimensions=2).actions
        >>> bool(np.abs(restored - chunk).max() < 0.1)
        True
    """

    tokenizer: Tokenizer
    scale: float
    smallest: int
    _characters: Numbers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_characters", _encodable_characters(self.tokenizer))

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return int(self.tokenizer.get_vocab_size())

    @classmethod
    def fit(cls, chunks: Iterable[Floats], vocabulary: int, scale: float) -> ActionTokens:
        """Train a tokenizer on normalized chunks (T, D). It can encode every chunk of this length in [-1, 1].

        Raises:
            ConfigurationError: the chunks need more different characters than `vocabulary` has tokens.
            DataError: there is no chunk.
        """
        integers = [_integers(chunk, scale) for chunk in chunks]
        if not integers:
            raise DataError("there are no chunks of actions to train the tokenizer on", code="chunks_missing")
        # No DCT coefficient of values in [-1, 1] exceeds the square root of their number (Parseval's theorem).
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
        # use_regex=False: splitting chunks into words like text would keep coefficients that happen to be spaces or
        # letters from merging with their neighbors.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, min_frequency=2, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((_text(each - smallest) for each in integers), trainer)
        return cls(tokenizer, scale, smallest)

    @classmethod
    def load(cls, folder: Path) -> ActionTokens:
        """Read the tokenizer that `save`, or the released code, wrote to `folder`.

        Raises:
            DataError: a file is missing or cannot be read.
        """
        try:
            config = read_finite(read_bytes(folder / CONFIG))
            if not (scale := float(config["scale"])) > 0:
                raise ValueError(f"scale is {scale}, not above 0")
            return cls(Tokenizer.from_file(str(regular(folder / TOKENIZER))), scale, int(config.get("min_token", 0)))
        except Exception as error:  # the tokenizers package raises plain Exception
            raise DataError(
                f"the action tokenizer cannot be read: {error}", code="invalid_action_tokenizer", where=str(folder)
            ) from error

    def save(self, folder: Path) -> None:
        """Write the tokenizer in the released file layout."""
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
        """Encode normalized actions (T, D). A coefficient without a character in the vocabulary is moved to the
        nearest one that has a character."""
        characters = np.maximum(_integers(actions, self.scale) - self.smallest, 0).ravel()
        after = np.minimum(np.searchsorted(self._characters, characters), len(self._characters) - 1)
        before = np.maximum(after - 1, 0)
        nearer = characters - self._characters[before] < self._characters[after] - characters
        characters = self._characters[np.where(nearer, before, after)]
        ids: list[int] = self.tokenizer.encode(_text(characters), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], horizon: int, dimensions: int) -> DecodedActions:
        """Decode tokens to a float32 chunk (horizon, dimensions), or return the reason why they are invalid."""
        unknown = [one for one in ids if not 0 <= one < self.vocabulary]
        if unknown:
            return DecodedActions(None, f"action token {unknown[0]} does not exist, there are {self.vocabulary}")
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        if _REPLACEMENT in text:
            return DecodedActions(None, "the action tokens end within a character")
        if len(text) != horizon * dimensions:
            return DecodedActions(None, f"the tokens hold {len(text)} coefficients, not {horizon} x {dimensions}")
        integers = np.array([ord(one) for one in text], np.float64).reshape(horizon, dimensions) + self.smallest
        return DecodedActions(idct(integers / self.scale, axis=0, norm="ortho").astype(np.float32))


def _integers(actions: Floats, scale: float) -> Numbers:
    """Return the DCT coefficients (T, D) of actions, multiplied by `scale` and rounded to integers.

    They are computed in float32, so that they round as in the released code.
    """
    return np.around(dct(np.asarray(actions, np.float32), axis=0, norm="ortho") * np.float32(scale)).astype(np.int64)


def _text(characters: Numbers) -> str:
    return "".join(map(chr, characters.ravel().tolist()))


def _as_bytes(text: str) -> str:
    """Return the printable characters that byte-level BPE uses for the bytes of `text`, one for each byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def _encodable_characters(tokenizer: Tokenizer) -> Numbers:
    """Return the sorted code points of characters whose UTF-8 bytes are all in the tokenizer's vocabulary.

    The tokenizer would silently drop any other character.
    """
    single_bytes = {token for token in tokenizer.get_vocab() if len(token) == 1}
    characters = [code for code in range(_CHARACTERS) if single_bytes.issuperset(_as_bytes(chr(code)))]
    if not characters:
        raise ConfigurationError("the action tokenizer has no characters", code="action_tokenizer_empty")
    return np.array(characters, np.int64)


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
