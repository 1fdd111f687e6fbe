"""The processor: encode a robot's observations and actions as model inputs, and decode predictions into actions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.inputs import (
    ModelProcessor,
    camera_images,
    normalized_actions,
    normalized_state,
    past_end,
    refuse_small_model,
)
from armature.components.robots.policies.molmoact2.configuration import SEMANTICS, MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.action_tokens import (
    ActionTokens,
    ActionVocabulary,
    DecodedActions,
)
from armature.components.robots.policies.molmoact2.processing.batch import (
    IGNORED,
    Example,
    Flags,
    Floats,
    Ints,
    PolicyBatch,
    collate,
    pack,
)
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from armature.components.robots.policies.norm_stats import RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings

_CACHED_TEXTS = 10_000

# Constants of `sequence_budget`, all in tokens but for the number of images.
_PROMPT, _TASK, _MARGIN, _MULTIPLE = 80, 32, 32, 64
_IMAGE, _USUAL_IMAGES = 196, 2
_ACTION_WRAPPING, _PER_STEP, _PER_DIMENSION = 4, 6, 0.95

# Patterns of `normalize_language`; \u201c\u2018 and \u201d\u2019 are typographic quotation marks.
_ENDING = ".,!?;:\u2026"
_CLOSING = "\"')]}\u201d\u2019"
_AROUND = "\"'`[](){}\u201c\u2018\u201d\u2019"
_LABEL = re.compile(r"^(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*", re.IGNORECASE)
_LEAD = re.compile(r"^(?:the|your)\s+task\s+is\s+to\s+", re.IGNORECASE)


class Processor(ModelProcessor):
    """The processor of MolmoAct2; see `ModelProcessor`.

    Processors of several robots may share a model if all have the longest of their chunks as `horizon`.

    cameras: If neither settings nor statistics name cameras it is empty, and the cameras of each observation are used,
        sorted by name.
    """

    def __init__(
        self,
        config: MolmoAct2Config,
        tokenizer: Any,
        settings: RobotPolicySettings,
        robot: RobotMetadata,
        layout: ImageLayout,
        action_tokens: ActionTokens | None = None,
        horizon: int | None = None,
    ) -> None:
        """
        Args:
            settings: Settings that `resolve` has completed by the robot's entry in norm_stats.json.
            action_tokens: Required for the action modes discrete and both.
            horizon: Number of actions of an example; None: `settings.chunk_size`.

        Raises:
            ConfigurationError: the parts do not fit each other.
            DataError: the tokenizer lacks a token, or has another id for it than the configuration.
        """
        super().__init__(config, tokenizer, settings, robot, settings.normalize_gripper)
        self.layout, self.action_tokens = layout, action_tokens
        self.horizon = horizon or self.chunk
        self.vocabulary = ActionVocabulary.find(tokenizer, config)
        self._setup = wrap(settings.setup_type or robot.setup_type, "setup", settings.add_setup_tokens)
        self._control = wrap(settings.control_mode or robot.control_mode, "control", settings.add_control_tokens)
        self._texts: dict[str, Ints] = {}
        self._refuse()

    @property
    def discrete(self) -> bool:
        """True if training examples contain action tokens."""
        return self.settings.action_mode != "continuous"

    @cached_property
    def budget(self) -> int:
        """Largest number of tokens of a training example."""
        return self._budget(len(self.cameras), self.discrete)

    def batch(self, examples: Sequence[Example], rows: Sequence[Sequence[int]] | None, multiple: int) -> PolicyBatch:
        """Make a batch for training; see `collate`, and `pack` for `rows`."""
        pad_id = self.vocabulary.pad
        if rows is not None:
            return pack(examples, rows, multiple, pad_id)
        return collate(examples, SEMANTICS[self.settings.semantics].pad_side, multiple, pad_id)

    def encode(
        self,
        observation: RobotObservation,
        actions: ArrayLike | None = None,
        padding: ArrayLike | None = None,
        where: str = "",
    ) -> Example:
        """Encode an observation; see `ModelProcessor`."""
        images = camera_images(observation, self.cameras or tuple(sorted(observation.images)), where)
        prompt = self._prompt(observation, len(images), where)
        normalized = None if actions is None else normalized_actions(actions, self.action, self.chunk, where)
        answer = self._answer(normalized) if normalized is not None and self.discrete else None
        ids = prompt if answer is None else np.concatenate([prompt, answer])
        limit = self._budget(len(images), answer is not None)
        if len(ids) > limit:
            raise DataError(
                f"an example has {len(ids)} tokens, {limit} are allowed",
                code="example_too_long",
                where=where or f"task {observation.task!r:.80}",
                remedy="shorten the task's text, or raise max_sequence_length",
            )
        tokens = self.vocabulary
        per_image = self.layout.patches**2
        pooling = self.layout.pooling
        return Example(
            input_ids=ids,
            image_tokens=np.isin(ids, tokens.image),
            pixel_values=self.layout.patchify(images),
            pooling=np.concatenate([np.where(pooling < 0, -1, pooling + i * per_image) for i in range(len(images))]),
            labels=None if answer is None else np.concatenate([np.full(len(prompt), IGNORED), answer]),
            actions=None if normalized is None else self._padded(normalized),
            horizon_padding=self._horizon_padding(padding, where),
            dimension_padding=np.arange(self.config.max_action_dim) >= self.action_dimensions,
        )

    def decode_tokens(self, ids: Sequence[int]) -> DecodedActions:
        """Decode generated tokens to normalized actions (chunk, dimensions), or return why they are invalid.

        Raises:
            ConfigurationError: the policy has no action tokenizer.
        """
        tokens, generated = self.vocabulary, list(ids)
        if self.action_tokens is None:
            raise ConfigurationError(
                "the policy has no action tokenizer",
                code="action_tokenizer_missing",
                remedy="set policy.action_tokenizer",
            )
        if tokens.action_start not in generated or tokens.action_end not in generated:
            return DecodedActions(None, "the generated tokens lack <action_start> or <action_end>")
        span = generated[generated.index(tokens.action_start) + 1 : generated.index(tokens.action_end)]
        return self.action_tokens.decode([one - tokens.action for one in span], self.chunk, self.action_dimensions)

    def _prompt(self, observation: RobotObservation, images: int, where: str) -> Ints:
        """Return the token ids of the prompt: BOS, the images, the user's turn, and the start of the model's turn.

        Tokens of images and of the state are inserted as ids and are never written as text.
        """
        tokens = self.vocabulary
        row = [tokens.image_patch] * self.layout.rows + [tokens.image_column] * self.layout.columns
        image = np.array([tokens.image_start, *row * self.layout.rows, tokens.image_end])
        state = normalized_state(observation, self.state, where)
        bins = state_bins(state, self.config.num_state_tokens) + tokens.state
        task = normalize_language(observation.task) if self.settings.normalize_language else observation.task
        before, after = instruction(task, self._setup, self._control)
        if np.isin(self._tokens(before), tokens.image).any():
            raise DataError(
                "the text contains image tokens",
                code="image_token_in_text",
                where=f"{where or 'the prompt'}, task {task!r:.80}",
                remedy="change the task's text",
            )
        labeled = [part for label in image_labels(images) for part in (self._tokens(label), image)]
        state_ids = np.array([tokens.state_start, *bins, tokens.state_end])
        return np.concatenate([[tokens.bos], *labeled, self._tokens(before), state_ids, self._tokens(after)])

    def _tokens(self, text: str) -> Ints:
        """Return the token ids of `text`, a part of the prompt; results are cached.

        The text must stand between special tokens in the prompt. Only then do its tokens not depend on the text around
        it.
        """
        ids = self._texts.get(text)
        if ids is None:
            ids = self.token_ids(text, add_special_tokens=False)
            if len(self._texts) >= _CACHED_TEXTS:
                self._texts.clear()
            self._texts[text] = ids
        return ids

    def _answer(self, normalized: Floats) -> Ints:
        assert self.action_tokens is not None
        tokens = self.vocabulary
        ids = [tokens.action + one for one in self.action_tokens.encode(normalized)]
        return np.array([tokens.action_start, *ids, tokens.action_end, tokens.eos])

    def _padded(self, normalized: Floats) -> Floats:
        padded = np.zeros((self.horizon, self.config.max_action_dim), np.float32)
        padded[: self.chunk, : self.action_dimensions] = normalized
        return padded

    def _horizon_padding(self, padding: ArrayLike | None, where: str) -> Flags:
        flags = np.arange(self.horizon) >= self.chunk
        if padding is not None and not SEMANTICS[self.settings.semantics].supervises_past_end:
            flags[: self.chunk] |= past_end(padding, self.chunk, where)
        return flags

    def _budget(self, images: int, discrete: bool) -> int:
        return self.settings.max_sequence_length or sequence_budget(
            images, self.state_dimensions, self.action_dimensions, self.chunk, discrete, len(self.layout.pooling)
        )

    def _refuse(self) -> None:
        if self.discrete and self.action_tokens is None:
            raise ConfigurationError(
                f"action_mode {self.settings.action_mode!r} needs an action tokenizer",
                code="action_tokenizer_missing",
                remedy="set policy.action_tokenizer, or action_mode to continuous",
            )
        vocabulary = 0 if self.action_tokens is None else self.action_tokens.vocabulary
        refuse_small_model(
            ("action tokens", vocabulary, self.config.num_action_tokens),
            ("action dimensions", self.action_dimensions, self.config.max_action_dim),
            ("actions of a chunk", self.chunk, self.horizon),
        )


def wrap(text: str, kind: Literal["setup", "control"], enabled: bool) -> str:
    """Put `text` between the start and end tokens of `kind`; return empty or already wrapped text unchanged.

    Example:
        >>> wrap("single arm", "setup", enabled=True)
        '<setup_start>single arm<setup_end>'
    """
    start, end = f"<{kind}_start>", f"<{kind}_end>"
    if not text or not enabled or (text.startswith(start) and text.endswith(end)):
        return text
    return f"{start}{text}{end}"


def image_labels(count: int) -> tuple[str, ...]:
    """Return the text before each of `count` images in the prompt; a single image has no label."""
    return ("",) if count == 1 else tuple(f"Image {number}" for number in range(1, count + 1))


def instruction(task: str, setup: str, control: str) -> tuple[str, str]:
    """Return the prompt's text before and after the state tokens: the user's turn and the start of the model's turn.

    The images stand before this text. `setup` and `control` are already wrapped.
    """
    before = f"<|im_start|>user\nThe task is to {task}. The setup is {setup}. The current state of the robot is "
    after = (
        f". The expected control mode is {control}. Given these, what action should the robot take to complete "
        "the task?<|im_end|>\n<|im_start|>assistant\n<action_output>"
    )
    return before, after


def normalize_language(text: str) -> str:
    """Normalize a task's text as in MolmoAct2's training data.

    Quotation marks, brackets, prefixes such as "Task:" and closing punctuation are removed until nothing changes.
    Sentences are joined with "; " and all is written in lower case on one line.

    Example:
        >>> normalize_language('Task: "Open the drawer. Put the bowl in."')
        'open the drawer; put the bowl in'
    """
    text, before = " ".join(text.split()), None
    while text != before:
        before = text
        text = text.strip().strip(_AROUND).strip()
        text = _LABEL.sub("", text, count=1).strip()
        text = _LEAD.sub("", text, count=1).strip()
        for ending in (_ENDING, _CLOSING, _ENDING):
            text = text.rstrip(ending).rstrip()
    sentences = [sentence.strip() for sentence in re.split(r"[.!?]+", text)]
    sentences = [sentence for sentence in sentences if sentence]
    return ("; ".join(sentences) if len(sentences) > 1 else text).lower()


def state_bins(state: Floats, count: int) -> Ints:
    """Return for each normalized value the index of the nearest of `count` points spread evenly over [-1, 1].

    A value in the middle between two points gets the even index. NaN counts as 0; values outside [-1, 1] are clipped.
    Computed in float32.

    Example:
        >>> state_bins(np.array([-1.0, 0.0, 2.0], np.float32), 256).tolist()
        [0, 128, 255]
    """
    values = np.nan_to_num(np.asarray(state, np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.rint((np.clip(values, -1, 1) + 1) / 2 * (count - 1)).astype(np.int64)


def sequence_budget(
    images: int, state_dimensions: int, action_dimensions: int, horizon: int, discrete: bool, image_tokens: int = _IMAGE
) -> int:
    """Return the largest number of tokens of an example, by the formula of the released code.

    Args:
        images: Number of images; 0 counts as two.
        discrete: True if the example contains action tokens.
        image_tokens: Tokens of an image; fewer than the released model's 196 count as 196.
    """
    tokens = max(_IMAGE, image_tokens) * (images or _USUAL_IMAGES) + _PROMPT + _TASK + state_dimensions + _MARGIN
    if discrete:
        tokens += _ACTION_WRAPPING + horizon * max(_PER_STEP, math.ceil(_PER_DIMENSION * action_dimensions))
    return math.ceil(tokens / _MULTIPLE) * _MULTIPLE
