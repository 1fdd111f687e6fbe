"""The environment `alfworld/thor`: each turn shows the agent's camera image and the text of the text game."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from pydantic import Field, PositiveInt

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import ActionDefect, Episode, Observation, Outcome, Split, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.installation import install_command
from armature.components.contracts.settings import Settings
from armature.components.environments.alfworld.games.game import GamesSettings, Source
from armature.components.environments.alfworld.games.generate import games_sources, load_games
from armature.components.environments.alfworld.packaged import names_of
from armature.components.environments.alfworld.prompts import EpisodePrompts, PromptSettings, parse_action
from armature.components.environments.alfworld.thor.actions import Release
from armature.components.environments.alfworld.thor.metadata import LONGEST_SIDE
from armature.components.environments.alfworld.thor.pool import ThorPlayerPool
from armature.components.environments.alfworld.thor.tasks import (
    PotentialReward,
    RewardSettings,
    RewardTracker,
    TerminalReward,
    thor_game,
    weights,
)

if TYPE_CHECKING:
    from armature.components.environments.alfworld.thor.agent import ThorAgent
    from armature.components.environments.alfworld.thor.player import ThorPlayer


# --- An episode ---


class ThorEpisode:
    """An episode of a game in AI2-THOR. Its methods block until a player is free and has answered.

    Raises:
        DataError: the task's payload is not a game with its scene.
        PlayerError: the player failed in `reset` or `step`; that player is not used again.
        ConfigurationError: `reset` could not start a player on this machine.
    """

    def __init__(
        self, task: Task, prompt: PromptSettings, reward: TerminalReward | PotentialReward, players: ThorPlayerPool
    ) -> None:
        self._game = thor_game(task)
        self._prompt, self._reward, self._players = prompt, reward, players
        self._player: ThorPlayer | None = None
        self._usable = False
        self._agent: ThorAgent
        self._dialogue: EpisodePrompts
        self._earned: RewardTracker

    async def reset(self) -> Observation:
        self._player = player = self._players.take()
        game = self._game
        self._agent = player.begin(game.trajectory.model_dump(), game.goal, names_of(game.problem))
        self._dialogue = EpisodePrompts(self._prompt, self._agent.feedback)
        self._earned = RewardTracker(self._reward, player.goal_share())
        observation = self._observation(player)
        self._usable = True
        return observation

    async def step(self, answer: str) -> Outcome:
        player = self._player
        assert player is not None, "an episode is reset before it is stepped"
        parsed = parse_action(answer, self._prompt.thinking)
        self._usable = False
        _, admissible = self._agent.act(parsed.action)
        self._dialogue.record_action(parsed.action, self._agent.feedback)
        share, won = player.goal_share(), bool(player.get_goal_satisfied())
        observation = None if won else self._observation(player)
        self._usable = True
        defect: ActionDefect | None = None
        if parsed.defect or not admissible:
            defect = "format" if parsed.defect else "inadmissible"
        return Outcome(observation, self._earned.turn(share, won), defect)

    async def close(self) -> None:
        if self._player is not None:
            self._players.give_back(self._player, self._usable)
            self._player = None

    def _observation(self, player: ThorPlayer) -> Observation:
        actions = tuple(self._agent.get_admissible_commands())
        content = (encode_frame(player.frame()), self._dialogue.text(actions))
        return Observation(content, admissible_actions=actions, anchor_key=self._dialogue.observation)


def encode_frame(frame: np.ndarray) -> EncodedImage:
    """Encode a frame, (height, width, 3) uint8 in the order red, green, blue, as PNG."""
    return encode_png(Image.fromarray(np.ascontiguousarray(frame)))


# --- The environment ---


class AlfworldThorSettings(Settings):
    """Settings of the environment `alfworld/thor`: the games, prompts, frames, player and rewards."""

    games: GamesSettings
    """Source of the games."""
    heldout_source: Source = "valid_seen"
    """Split of the games from which held-out tasks are taken."""
    prompt: PromptSettings = PromptSettings()
    """Templates of prompts, and rules for reading answers."""
    width: PositiveInt = Field(300, le=LONGEST_SIDE)
    """Width of a frame in pixels; AI2-THOR's default is 300."""
    height: PositiveInt = Field(300, le=LONGEST_SIDE)
    """Height of a frame in pixels."""
    player: Release = "5.0"
    """Release of AI2-THOR's player. ai2thor downloads 5.0. For 2.1, with which ALFRED's data was made, set the
    environment variable ARMATURE_THOR_PLAYER to the executable."""
    max_turns: PositiveInt = 50
    """Largest number of turns in an episode."""
    reward: RewardSettings = PotentialReward(name="potential")
    """Reward of a turn: terminal (only the win) or potential (progress as well)."""


class AlfworldThor:
    """An environment of games in AI2-THOR. Each running episode uses one of `processes` players.

    Other episodes wait in `reset` for a free player, which counts as time of the reset. So set
    `machine.limits.max_concurrent` to `machine.workers.environments`. The anchor of step-level groups is the feedback's
    text, as in the text game, never the frame.
    """

    name = "alfworld/thor"
    Settings = AlfworldThorSettings
    system_prompt: str | None = None
    dialogue = False

    def __init__(
        self, settings: AlfworldThorSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        self.settings = settings
        self.max_turns = settings.max_turns
        self.reward_weights = weights(settings.reward)
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed = seed
        self._players = ThorPlayerPool(self._start, processes)

    @staticmethod
    def sources(settings: AlfworldThorSettings) -> dict[str, str]:
        return games_sources(settings.games)

    def tasks(self, split: Split) -> Iterator[Task]:
        source = "train" if split == "train" else self.settings.heldout_source
        games = load_games(self.settings.games, source, count=self._counts[split], seed=self._seed)
        for index, game in enumerate(games):
            payload = {**game.payload(), "trajectory": dict(game.trajectory)}
            yield Task(f"alfworld-thor-{split}-{index:05d}", split, payload)

    def episode(self, task: Task) -> Episode:
        """Return the episode of a task.

        Raises:
            DataError: the task's payload is not a game with its scene.
        """
        return ThorEpisode(task, self.settings.prompt, self.settings.reward, self._players)

    def demonstration(self, task: Task) -> Sequence[str]:
        return [self.settings.prompt.demonstration(command) for command in task.payload["plan"]]

    def close(self) -> None:
        self._players.close()

    def _start(self) -> ThorPlayer:
        try:
            from armature.components.environments.alfworld.thor.player import ThorPlayer
        except ImportError as error:
            raise ConfigurationError(
                f"alfworld/thor needs packages that are not installed: {error}",
                code="package_missing",
                remedy=install_command("thor"),
            ) from error
        return ThorPlayer(self.settings.player, width=self.settings.width, height=self.settings.height)
