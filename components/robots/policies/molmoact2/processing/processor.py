"""What a robot sees and did, as an example for the model; and the model's answer, as actions of the robot."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from threading import Lock
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.machine import available_cpus
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.configuration import SEMANTICS, MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.action_tokens import (
    ActionTokens,
    ActionVocabulary,
    DecodedActions,
)
from armature.components.robots.policies.molmoact2.processing.batch import IGNORED, Example, Flags, Floats, Ints
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from armature.components.robots.policies.molmoact2.processing.norm_stats import Normalizer, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings

# Observations are encoded in threads: most of it is resizing images, which other threads need not wait for.

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_threads(function: Callable[[Given], Made], items: Sequence[Given]) -> list[Made]:
    """`function` of each item, in their order; the first error is raised."""
    return list(_threads().map(function, items)) if len(items) > 1 else [function(item) for item in items]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cpus(), "encode")


_REMEMBERED = 10_000  # texts whose tokens are kept
_TOKENIZING = Lock()  # a fast tokenizer refuses a second thread

_PROMPT, _TASK, _MARGIN, _MULTIPLE = 80, 32, 32, 64
_IMAGE, _USUAL_IMAGES = 196, 2
_ACTION_WRAPPING, _PER_STEP, _PER_DIMENSION = 4, 6, 0.95

_OPEN, _SHUT = "\u201c\u2018", "\u201d\u2019"  # typographic quotation marks
_ENDING = ".,!?;:\u2026"
_CLOSING = "\"')]}" + _SHUT
_AROUND = "\"'`[](){}" + _OPEN + _SHUT
_LABEL = re.compile(r"^(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*", re.IGNORECASE)
_LEAD = re.compile(r"^(?:the|your)\s+task\s+is\s+to\s+", re.IGNORECASE)


class Processor:
    """For one robot. Several may share a model: give all of them the longest chunk as `horizon`.

    cameras: In the model's order; empty where neither settings nor statistics name any, then the observation's, sorted.
    chunk: Actions that this robot's data and answers have; an example has `horizon`, the rest being padding.
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
            tokenizer: The checkpoint's, a transformers fast tokenizer.
            settings: Resolved: what a tag overrides is in them.
            action_tokens: Needed for action modes discrete and both.
            horizon: Of an example; none: the settings' chunk.

        Raises:
            ConfigurationError: the parts do not fit each other.
            DataError: the tokenizer lacks a token, or disagrees with the configuration.
        """
        self.config, self.tokenizer, self.settings, self.robot = config, tokenizer, settings, robot
        self.layout, self.action_tokens = layout, action_tokens
        self.chunk = settings.chunk_size
        self.horizon = horizon or self.chunk
        self.cameras = settings.image_keys or robot.camera_keys
        self.vocabulary = ActionVocabulary.find(tokenizer, config)
        gripper = settings.normalize_gripper
        self.state = Normalizer.build("state", robot.state_stats, settings.state_normalization, gripper)
        self.action = Normalizer.build("action", robot.action_stats, settings.action_normalization, gripper)
        self._setup = wrap(settings.setup_type or robot.setup_type, "setup", settings.add_setup_tokens)
        self._control = wrap(settings.control_mode or robot.control_mode, "control", settings.add_control_tokens)
        self._texts: dict[str, Ints] = {}
        self._refuse()

    @property
    def state_dimensions(self) -> int:
        return self.state.dimensions

    @property
    def action_dimensions(self) -> int:
        return self.action.dimensions

    @property
    def discrete(self) -> bool:
        """Whether examples with actions have them as tokens, too."""
        return self.settings.action_mode != "continuous"

    @cached_property
    def budget(self) -> int:
        """Tokens an example may have when actions are trained."""
        return self._budget(len(self.cameras), self.discrete)

    def encode(
        self,
        observation: RobotObservation,
        actions: ArrayLike | None = None,
        padding: ArrayLike | None = None,
        where: str = "",
    ) -> Example:
        """
        Args:
            actions: (chunk, dimensions) in the dataset's units, when they are trained.
            padding: (chunk,) True where the episode was over already.
            where: Dataset, episode and frame, for errors.

        Raises:
            DataError: a camera is missing, a shape is wrong, a number is not finite, or there are too many tokens.
        """
        camera_images = self._camera_images(observation, where)
        prompt = self._prompt(observation, len(camera_images), where)
        normalized = None if actions is None else self._actions(actions, where)
        answer = self._answer(normalized) if normalized is not None and self.discrete else None
        ids = prompt if answer is None else np.concatenate([prompt, answer])
        limit = self._budget(len(camera_images), answer is not None)
        if len(ids) > limit:
            raise DataError(
                f"an example of {len(ids)} tokens, and {limit} are allowed",
                code="example_too_long",
                where=where or f"task {observation.task!r:.80}",
                remedy="shorten the task's words, or raise max_sequence_length",
            )
        tokens = self.vocabulary
        images = (tokens.image_start, tokens.image_end, tokens.image_patch, tokens.image_column)
        per_image = self.layout.patches**2
        pooling = self.layout.pooling
        return Example(
            input_ids=ids,
            image_tokens=np.isin(ids, images),
            pixel_values=self.layout.patchify(camera_images),
            pooling=np.concatenate(
                [np.where(pooling < 0, -1, pooling + i * per_image) for i in range(len(camera_images))]
            ),
            labels=None if answer is None else np.concatenate([np.full(len(prompt), IGNORED), answer]),
            actions=None if normalized is None else self._padded(normalized),
            horizon_padding=self._horizon_padding(padding, where),
            dimension_padding=np.arange(self.config.max_action_dim) >= self.action_dimensions,
        )

    def decode(self, actions: ArrayLike) -> Floats:
        """(..., at least chunk, at least dimensions) normalized, to float32 (..., chunk, dimensions) of the dataset."""
        return self.action.restore(np.asarray(actions)[..., : self.chunk, : self.action_dimensions])

    def decode_tokens(self, ids: Sequence[int]) -> DecodedActions:
        """Normalized actions (chunk, dimensions) that generated tokens say, or why they say none."""
        tokens, generated = self.vocabulary, list(ids)
        if self.action_tokens is None:
            raise ConfigurationError(
                "the policy has no action tokens", code="action_tokenizer_missing", remedy="give it an action tokenizer"
            )
        if tokens.action_start not in generated or tokens.action_end not in generated:
            return DecodedActions(None, "the answer has no <action_start> or no <action_end>")
        span = generated[generated.index(tokens.action_start) + 1 : generated.index(tokens.action_end)]
        return self.action_tokens.decode([one - tokens.action for one in span], self.chunk, self.action_dimensions)

    def _camera_images(self, observation: RobotObservation, where: str) -> list[Any]:
        cameras = self.cameras or tuple(sorted(observation.images))
        missing = [camera for camera in cameras if camera not in observation.images]
        if missing or not cameras:
            raise DataError(
                f"the observation has no camera {missing[0]!r}" if missing else "the observation has no camera",
                code="camera_image_missing",
                where=where or f"it has {', '.join(observation.images) or 'none'}",
                remedy="name the cameras that there are in image_keys",
            )
        return [observation.images[camera] for camera in cameras]

    def _prompt(self, observation: RobotObservation, images: int, where: str) -> Ints:
        """BOS, the images, and the user's turn; `<|image|>` and the state are put in as ids."""
        tokens = self.vocabulary
        row = [tokens.image_patch] * self.layout.rows + [tokens.image_column] * self.layout.columns
        image = np.array([tokens.image_start, *row * self.layout.rows, tokens.image_end])
        state = self.state.normalize(observation.state, where)
        if state.ndim != 1:
            raise DataError(
                f"the state has the shape {state.shape}, not one dimension", code="dimensions_mismatch", where=where
            )
        bins = state_bins(state, self.config.num_state_tokens) + tokens.state
        task = normalize_language(observation.task) if self.settings.normalize_language else observation.task
        before, after = instruction(task, self._setup, self._control)
        labeled = [part for label in image_labels(images) for part in (self._tokens(label), image)]
        state_ids = np.array([tokens.state_start, *bins, tokens.state_end])
        return np.concatenate([[tokens.bos], *labeled, self._tokens(before), state_ids, self._tokens(after)])

    def _tokens(self, text: str) -> Ints:
        """Of a text that special tokens stand on both sides of, so that it is split alone."""
        known = self._texts.get(text)
        if known is None:
            with _TOKENIZING:
                known = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
            if len(self._texts) >= _REMEMBERED:
                self._texts.clear()
            self._texts[text] = known
        return known

    def _actions(self, actions: ArrayLike, where: str) -> Floats:
        values = np.asarray(actions, np.float32)
        if values.shape != (self.chunk, self.action_dimensions):
            raise DataError(
                f"actions have the shape {values.shape}, not {(self.chunk, self.action_dimensions)}",
                code="chunk_shape_mismatch",
                where=where,
                remedy="chunk_size and the dataset's windows must agree",
            )
        if not np.isfinite(values).all():
            step, dimension = np.argwhere(~np.isfinite(values))[0]
            raise DataError(
                f"action {self.action.names[dimension]!r} is {values[step, dimension]} at step {step}",
                code="action_not_finite",
                where=where,
            )
        return self.action.normalize(values, where)

    def _answer(self, normalized: Floats) -> Ints:
        assert self.action_tokens is not None
        tokens = self.vocabulary
        said = [tokens.action + one for one in self.action_tokens.encode(normalized)]
        return np.array([tokens.action_start, *said, tokens.action_end, tokens.eos])

    def _padded(self, normalized: Floats) -> Floats:
        padded = np.zeros((self.horizon, self.config.max_action_dim), np.float32)
        padded[: self.chunk, : self.action_dimensions] = normalized
        return padded

    def _horizon_padding(self, padding: ArrayLike | None, where: str) -> Flags:
        flags = np.arange(self.horizon) >= self.chunk
        if padding is not None and not SEMANTICS[self.settings.semantics].supervises_past_end:
            past = np.asarray(padding, bool)
            if past.shape != (self.chunk,):
                raise DataError(
                    f"padding has the shape {past.shape}, not {(self.chunk,)}", code="chunk_shape_mismatch", where=where
                )
            flags[: self.chunk] |= past
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
                remedy="give one, or choose action_mode continuous",
            )
        given = 0 if self.action_tokens is None else self.action_tokens.vocabulary
        for what, value, most in (
            ("action tokens", given, self.config.num_action_tokens),
            ("action dimensions", self.action_dimensions, self.config.max_action_dim),
            ("actions of a chunk", self.chunk, self.horizon),
        ):
            if value > most:
                raise ConfigurationError(
                    f"{value} {what}, and the model has {most}", code="model_too_small", where="config.json"
                )


def wrap(text: str, kind: Literal["setup", "control"], enabled: bool) -> str:
    """`text` between the tokens of its kind, unless it is empty, wrapped already, or they are not wanted."""
    start, end = f"<{kind}_start>", f"<{kind}_end>"
    if not text or not enabled or (text.startswith(start) and text.endswith(end)):
        return text
    return f"{start}{text}{end}"


def image_labels(count: int) -> tuple[str, ...]:
    """What stands before each of `count` images."""
    return ("",) if count == 1 else tuple(f"Image {number}" for number in range(1, count + 1))


def instruction(task: str, setup: str, control: str) -> tuple[str, str]:
    """The user's turn, and the beginning of the answer, before the state tokens and after them.

    The images stand before the turn. `setup` and `control` are wrapped already.
    """
    before = f"<|im_start|>user\nThe task is to {task}. The setup is {setup}. The current state of the robot is "
    after = (
        f". The expected control mode is {control}. Given these, what action should the robot take to complete "
        "the task?<|im_end|>\n<|im_start|>assistant\n<action_output>"
    )
    return before, after


def normalize_language(text: str) -> str:
    """A task's text as MolmoAct2 was trained on: lower case, one line, no wrapping, no closing punctuation.

    It is unwrapped until nothing changes; its sentences are joined with "; ".
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
    """For each normalized value the nearest of `count` points spread evenly over [-1, 1]; halves go to the even one.

    NaN is 0, values outside are clipped. Computed in float32.
    """
    values = np.nan_to_num(np.asarray(state, np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.rint((np.clip(values, -1, 1) + 1) / 2 * (count - 1)).astype(np.int64)


def sequence_budget(
    images: int, state_dimensions: int, action_dimensions: int, horizon: int, discrete: bool, image_tokens: int = _IMAGE
) -> int:
    """The limit that the released code derives from an example's parts.

    Args:
        images: 0 counts as two.
        discrete: Whether action tokens are part of the example.
        image_tokens: Of an image; fewer than the released model's count as its 196.
    """
    tokens = max(_IMAGE, image_tokens) * (images or _USUAL_IMAGES) + _PROMPT + _TASK + state_dimensions + _MARGIN
    if discrete:
        tokens += _ACTION_WRAPPING + horizon * max(_PER_STEP, math.ceil(_PER_DIMENSION * action_dimensions))
    return math.ceil(tokens / _MULTIPLE) * _MULTIPLE
