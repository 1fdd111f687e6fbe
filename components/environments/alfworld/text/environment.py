"""ALFWorld's text games: each turn says what happened and asks for a command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from armature.components.contracts.episodes import ActionDefect, Observation, Outcome, Split, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings
from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.game import GamesSettings, GeneratedGames, Source
from armature.components.environments.alfworld.games.load import games_sources, load_games
from armature.components.environments.alfworld.games.untrusted import check_goal, check_problem
from armature.components.environments.alfworld.prompts import EpisodePrompts, PromptSettings, parse_action
from armature.components.environments.alfworld.text.host import EngineHost, EngineReply, HostedGame, shared_host
from armature.components.environments.alfworld.text.schematic import KnownState, NoImage, Schematic, draw
from armature.components.environments.alfworld.text.searching import with_detours


class AlfworldTextSettings(Settings):
    """The games, the words around them, the image, and what winning is worth."""

    games: GamesSettings = Field(GeneratedGames(source="generated"), description="Where games come from.")
    heldout_source: Literal["valid_seen", "valid_unseen"] = Field(
        "valid_seen",
        description="The split that held-out tasks are from: other games in scenes of the training split, or scenes "
        "that are in no training game.",
    )
    prompt: PromptSettings = Field(
        PromptSettings(), description="What the policy is asked, and how its answer is read."
    )
    image: Annotated[NoImage | Schematic, Field(discriminator="form")] = Field(
        NoImage(form="none"), description="What is shown before the text."
    )
    max_turns: PositiveInt = Field(50, description="Most turns of an episode.")
    max_invalid_actions: NonNegativeInt = Field(
        0,
        description="The episode is lost at this many answers that were not admissible actions; 0: never, as usual. "
        "A policy that is stuck fills its other turns with one action again and again: noise to learn from.",
    )
    won_weight: float = Field(10.0, description="Reward for reaching the goal, given in the turn that reaches it.")
    detours: NonNegativeInt = Field(
        2,
        description="Most places that a demonstration looks into in vain before it goes where its first object is. "
        "With 0, whoever learns from it never sees a place where the object is not.",
    )


class AlfworldText:
    """Episodes share `processes` processes, which play many games each and are started by the first reset.

    Other environments of this kind that are open at the same time share them as well.

    The anchor of step-level groups is the engine's text alone: neither the history nor the image is in it.
    """

    name = "alfworld/text"
    Settings = AlfworldTextSettings
    system_prompt: str | None = None
    dialogue = False

    def __init__(
        self, settings: AlfworldTextSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        packaged.folder()
        self.settings = settings
        self.max_turns = settings.max_turns
        self.reward_weights = {"won": settings.won_weight}
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed = seed
        self._processes = processes
        self._host: EngineHost | None = shared_host(processes)

    @staticmethod
    def sources(settings: AlfworldTextSettings) -> dict[str, str]:
        return games_sources(settings.games)

    def tasks(self, split: Split) -> Iterator[Task]:
        source: Source = "train" if split == "train" else self.settings.heldout_source
        games = load_games(self.settings.games, source, count=self._counts[split], seed=self._seed)
        for index, game in enumerate(games):
            yield Task(f"alfworld-text-{split}-{index:05d}", split, game.payload())

    def episode(self, task: Task) -> TextEpisode:
        """
        Raises:
            DataError: the payload's problem or goal is not what the engine may be given.
        """
        problem = check_problem(task.payload["problem"], where=task.task_id)
        goal = check_goal(task.payload["goal"], where=task.task_id)
        name = f"{task.payload['source']}/{task.payload['game']}"
        self._host = self._host or shared_host(self._processes)
        return TextEpisode(self._host.play(name, problem, goal), self.settings)

    def demonstration(self, task: Task) -> Sequence[str]:
        plan, problem = task.payload["plan"], task.payload["problem"]
        commands = with_detours(plan, problem, self.settings.detours, Random(task.task_id))
        return [self.settings.prompt.demonstration(command) for command in commands]

    def close(self) -> None:
        """The processes end with the last environment, or the last episode, that they were shared with."""
        self._host = None


class TextEpisode:
    """Blocks: every call waits for the process that plays the game."""

    def __init__(self, game: HostedGame, settings: AlfworldTextSettings) -> None:
        self._game, self._settings = game, settings
        self._turns = 0

    async def reset(self) -> Observation:
        self._shown = self._game.reset()
        self._turns = self._invalid_actions = 0
        self._dialogue = EpisodePrompts(self._settings.prompt, self._shown.feedback)
        self._seen = KnownState.begin(self._dialogue.task)
        return self._observation(self._shown)

    async def step(self, action: str) -> Outcome:
        """An answer that is not an admissible command acts as well: the engine then says that nothing happens."""
        read = parse_action(action, self._settings.prompt.thinking)
        defect: ActionDefect | None = "format" if read.defect else None
        if defect is None and read.action not in self._shown.commands:
            defect = "inadmissible"
        self._shown = self._game.step(read.action)
        self._dialogue.acted(read.action, self._shown.feedback)
        self._turns += 1
        self._invalid_actions += defect is not None
        lost = (
            self._turns == self._settings.max_turns or 0 < self._settings.max_invalid_actions == self._invalid_actions
        )
        if self._shown.won or lost:
            return Outcome(None, {"won": float(self._shown.won)}, defect)
        return Outcome(self._observation(self._shown), action_defect=defect)

    async def close(self) -> None:
        self._game.close()

    def _observation(self, shown: EngineReply) -> Observation:
        text = self._dialogue.text(shown.commands)
        self._seen.read(shown.feedback)
        return Observation((*self._image(), text), shown.commands, anchor_key=self._dialogue.observation)

    def _image(self) -> tuple[EncodedImage, ...]:
        image = self._settings.image
        return (draw(self._seen.cells(), image.image_size),) if isinstance(image, Schematic) else ()
