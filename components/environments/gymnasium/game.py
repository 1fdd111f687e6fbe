"""One Gymnasium environment in play: answers become actions, observations and frames become what the policy sees."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from PIL import Image

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import ActionDefect
from armature.components.contracts.errors import ArmatureError, ConfigurationError, said
from armature.components.contracts.images import EncodedImage
from armature.components.environments.generated import bare_answer
from armature.components.environments.gymnasium.settings import GymnasiumSettings
from armature.components.environments.openenv.messages import filled_prompt, flattened
from armature.components.machine.project import load_object
from armature.components.machine.workers.channel import WorkerError
from armature.components.rewards.reward import extracted, wrapped

_SEPARATORS = re.compile(r"[,;\n]")
Played = TypeVar("Played")


@dataclass(frozen=True)
class GameTurn:
    """The state after a turn: what the policy sees, the names of the possible actions, and what the turn earned."""

    content: tuple[str | EncodedImage, ...]
    admissible: tuple[str, ...] | None
    anchor: str
    reward: float = 0.0
    ended: bool = False
    success: bool = False
    defect: ActionDefect | None = None


def make_env(settings: GymnasiumSettings, make: Mapping[str, Any]) -> Any:
    """Make the environment with the arguments `make`, and its wrappers.

    Raises:
        ConfigurationError: gymnasium or a module is missing, the environment cannot be made, its actions are neither
            Discrete nor Text, or `actions` does not name them all.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigurationError(
            "the package gymnasium is not installed",
            code="gymnasium_missing",
            where="environment.name",
            remedy="pip install 'armature-vla[gymnasium]', and the package that has the environment",
        ) from error
    frames = {"render_mode": "rgb_array"} if settings.image == "render" else {}
    try:
        env = gymnasium.make(settings.id, disable_env_checker=True, **{**frames, **make})
        for wrapper in settings.wrappers:
            env = load_object(wrapper.call, "the wrapper")(env, **wrapper.args)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the environment {settings.id!r} cannot be made: {said(error)}",
            code="gymnasium_make_failed",
            where="environment.args",
            remedy="correct id, make and wrappers, and name the module that registers the id in modules",
        ) from error
    _check_actions(env.action_space, settings)
    return env


def _check_actions(space: Any, settings: GymnasiumSettings) -> None:
    from gymnasium import spaces

    if not isinstance(space, spaces.Discrete | spaces.Text):
        kind = "continuous numbers" if isinstance(space, spaces.Box) else "neither Discrete nor Text"
        raise ConfigurationError(
            f"the actions of {settings.id!r} are {kind}: {space!s:.200}. A model's answer names one of several actions",
            code="action_space_refused",
            where="environment.args.id",
            remedy="name a wrapper in wrappers that makes its actions Discrete; robot policies, whose actions are "
            "continuous, learn with the flows train-vla and train-vla-rl",
        )
    count = int(space.n) if isinstance(space, spaces.Discrete) else 0
    if count != len(settings.actions):
        raise ConfigurationError(
            f"{settings.id!r} has {count or 'no'} actions to name, and actions has {len(settings.actions)} names",
            code="action_names_mismatch",
            where="environment.args.actions",
            remedy="write one name for each action, in the environment's order; none for actions that are texts",
        )


class GymnasiumGame:
    """A game of one environment, which is started by `reset` and played by `step`.

    Random numbers from `random` and `numpy.random` depend on the seed and the turn alone, so games that share a process
    do not disturb each other.

    Raises:
        WorkerError: the environment raised an error, or returned a reward or an image that is not one. It must not be
            used any further.
    """

    def __init__(self, env: Any, settings: GymnasiumSettings) -> None:
        self.env = env
        self.turns = 0
        self._settings = settings
        self._names = {bare_answer(name): index for index, name in enumerate(settings.actions)}

    def reset(self, seed: int) -> GameTurn:
        """Start the game that `seed` determines."""
        self._seed, self._total, self.turns = seed, 0.0, 0

        def reset() -> GameTurn:
            self._observation, self._info = self.env.reset(seed=seed)
            return self._turn()

        return self._guarded(reset)

    def step(self, answer: str) -> GameTurn:
        """Play an answer. An answer that is not valid plays nothing, or nothing from an impossible action on."""
        self.turns += 1
        return self._guarded(lambda: self._play(answer))

    def demonstrate(self, seed: int) -> list[str]:
        """Let the expert play the game of `seed` and return its answers. It may give up before the game ends."""
        self.reset(seed)
        actions = self._guarded(lambda: iter(load_object(str(self._settings.expert), "the expert")(self.env)))
        answers: list[str] = []
        while len(answers) < self._settings.max_turns:
            answer = self._guarded(lambda: self._answer(next(actions, None)))
            if answer is None:
                break
            answers.append(answer)
            if self.step(answer).ended:
                break
        return answers

    def _play(self, answer: str) -> GameTurn:
        actions = self._actions(answer)
        reward, terminated, truncated = 0.0, False, False
        defect: ActionDefect | None = None if actions else "format"
        for action in actions:
            if not self._possible(action):
                defect = "inadmissible"
                break
            self._observation, step_reward, terminated, truncated, self._info = self.env.step(action)
            reward += float(step_reward)
            if terminated or truncated:
                break
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}")
        self._total += reward
        if terminated or truncated:  # the policy does not see the last observation, so it may be anything
            return GameTurn((), None, "", reward, True, self._is_success(bool(terminated)), defect)
        return replace(self._turn(), reward=reward, defect=defect)

    def _turn(self) -> GameTurn:
        content = self._content()
        if self._settings.anchor == "observation":
            state = [value for _, value in flattened({"obs": self._observation}) if not isinstance(value, Mapping)]
        else:
            state = [part if isinstance(part, str) else part.data for part in content]
        parts = (each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode() for each in state)
        anchor = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
        return GameTurn(content, self._admissible(), anchor)

    def _guarded(self, play: Callable[[], Played]) -> Played:
        random.seed(f"{self._seed}/{self.turns}")
        np.random.seed(crc32(f"{self._seed}/{self.turns}".encode()))
        try:
            return play()
        except ArmatureError:
            raise
        except BaseException as error:
            with suppress(Exception):
                self.env.close()
            raise WorkerError(f"{self._settings.id}: {said(error)}"[:2000], code="environment_failed") from error

    def _actions(self, answer: str) -> list[Any]:
        """Return the actions in an answer; an empty list if it has none, too many, or an unknown one."""
        text = extracted(answer, self._settings.extract)
        if text is None:
            return []
        if not self._names:
            return [text] if self.env.action_space.contains(text) else []
        parts = _SEPARATORS.split(text) if self._settings.actions_per_turn > 1 else [text]
        names = [name for part in parts if (name := bare_answer(part))]
        if len(names) > self._settings.actions_per_turn or not all(name in self._names for name in names):
            return []
        return [int(self.env.action_space.start) + self._names[name] for name in names]

    def _answer(self, action: Any) -> str | None:
        """Return an answer that plays an expert's action: its name, or the action itself where actions are texts."""
        if action is None:
            return None
        if not self.env.action_space.contains(action):
            raise ValueError(f"the expert yielded {action!r:.80}, which is not in {self.env.action_space!s:.80}")
        text = self._settings.actions[int(action - self.env.action_space.start)] if self._names else str(action)
        return wrapped(text, self._settings.extract)

    def _mask(self) -> Any:
        mask = self._info.get("action_mask")
        if mask is None or not self._names:
            return None
        mask = np.asarray(mask, bool)
        if mask.shape != (len(self._names),):
            raise ValueError(f"action_mask has the shape {mask.shape}, and there are {len(self._names)} actions")
        return mask

    def _possible(self, action: Any) -> bool:
        mask = self._mask()
        return mask is None or bool(mask[action - int(self.env.action_space.start)])

    def _admissible(self) -> tuple[str, ...] | None:
        if not self._names:
            return None
        mask = self._mask()
        return tuple(name for at, name in enumerate(self._settings.actions) if mask is None or mask[at])

    def _is_success(self, terminated: bool) -> bool:
        rule = self._settings.success
        if rule == "terminated":
            return terminated
        if rule.startswith("info."):
            return bool(self._entry(rule))
        _, sign, bound = rule.split()
        return self._total > float(bound) or (sign == ">=" and self._total == float(bound))

    def _content(self) -> tuple[str | EncodedImage, ...]:
        observation = {"obs": self._observation, "info": self._info}
        entries = self._observation if isinstance(self._observation, Mapping) else {}
        named = {name: _value(value) for name, value in flattened({**entries, **observation})}
        return filled_prompt(self._settings.prompt, named, self._images())

    def _entry(self, name: str) -> Any:
        """Return the entry obs.KEY or info.KEY of the last step."""
        entries = dict(flattened({"obs": self._observation, "info": self._info}))
        if name not in entries:
            raise ValueError(f"{name} is missing in a step, which has {', '.join(entries):.500}")
        return entries[name]

    def _images(self) -> list[EncodedImage]:
        if self._settings.image == "none":
            return []
        frame = self.env.render() if self._settings.image == "render" else self._observation
        if self._settings.image.startswith("obs."):
            frame = self._entry(self._settings.image)
        pixels = np.asarray(frame)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
            raise ValueError(f"image = {self._settings.image!r} is {pixels.dtype} of shape {pixels.shape}, not pixels")
        image = Image.fromarray(pixels)
        if size := self._settings.image_size:
            image = image.resize((size, size), Image.Resampling.BOX)
        return [encode_png(image)]


def _value(value: Any) -> Any:
    """Return a value for a prompt: arrays of numbers as JSON, numpy's numbers as Python's."""
    if isinstance(value, np.ndarray):
        return json.dumps(value.tolist())
    return value.item() if isinstance(value, np.generic) else value
