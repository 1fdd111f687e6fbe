"""The environment `alfworld/text`: each turn shows the game's text and asks for a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Annotated, Literal

from PIL import Image, ImageDraw
from pydantic import Field, NonNegativeInt, PositiveInt

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import ActionDefect, Observation, Outcome, Split, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings
from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.game import (
    GamesSettings,
    GeneratedGames,
    Source,
    check_goal,
    check_problem,
)
from armature.components.environments.alfworld.games.generate import games_sources, load_games
from armature.components.environments.alfworld.games.scenes import escaped, may_hold
from armature.components.environments.alfworld.packaged import names_of
from armature.components.environments.alfworld.prompts import EpisodePrompts, PromptSettings, parse_action
from armature.components.environments.alfworld.text.host import EngineHost, EngineReply, HostedGame, shared_host

# --- A small image of the game's texts: colored cells for the goal, the place, the held object and the visible ones ---
#
# The image shows only facts from the texts. Each kind of thing has a pair of colors, so that a model with small images
# can recognize it without reading.

GRID = 4
COLORS = (
    (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240),
    (240, 50, 230), (210, 245, 60), (0, 128, 128), (170, 110, 40), (128, 0, 0), (0, 0, 128),
)  # fmt: skip
"""Colors that are easy to tell apart. A kind's cell has one of them in its upper half and one in its lower half."""

_THING = re.compile(r"\b([a-z]+) \d+\b")
_PLACE = re.compile(r"^You (?:arrive at|open the|close the) ([a-z]+ \d+)")
_SEEN = re.compile(r"(?:you see) ([^.]*)\.")
_TAKEN = re.compile(r"^You pick up the ([a-z]+) \d+ from")
_PUT = re.compile(r"^You move the [a-z]+ \d+ to")


class NoImage(Settings):
    """Show text without an image."""

    form: Literal["none"]
    """none: show no image."""


class Schematic(Settings):
    """Show an image of 4 x 4 cells: the goal's things, the place and the held object, and eight visible things."""

    form: Literal["schematic"]
    """schematic: show colored cells for the facts in the text."""
    image_size: int = Field(56, ge=16, le=1024, multiple_of=GRID)
    """Width and height in pixels."""


@dataclass
class KnownState:
    """The facts about the current state that the game's texts have mentioned so far, as words for kinds of things."""

    goal: tuple[str, ...]
    place: str | None = None
    held: str | None = None
    around: tuple[str, ...] = ()

    @classmethod
    def begin(cls, task: str) -> KnownState:
        """Return the state at the start, with the kinds of things that the goal sentence names."""
        return cls(tuple(word for word in re.findall(r"[a-z]+", task.lower()) if word in kinds())[:GRID])

    def read(self, feedback: str) -> None:
        """Update the state by an observation of the game."""
        if place := _PLACE.search(feedback):
            self.place = place[1].split()[0]
            self.around = ()
        if seen := _SEEN.search(feedback):
            self.around = tuple(_THING.findall(seen[1]))
        if taken := _TAKEN.search(feedback):
            self.held = taken[1]
            if taken[1] in self.around:
                index = self.around.index(taken[1])
                self.around = self.around[:index] + self.around[index + 1 :]
        elif _PUT.search(feedback) and self.held:
            self.around, self.held = (*self.around, self.held), None

    def cells(self) -> tuple[str | None, ...]:
        """Return the kind in each cell, row by row; None for an empty cell."""
        around = self.around[:GRID], self.around[GRID : 2 * GRID]
        rows: list[tuple[str | None, ...]] = [self.goal, (self.place, self.held), *around]
        return tuple(kind for row in rows for kind in (*row, *[None] * (GRID - len(row))))


@lru_cache(1)
def kinds() -> dict[str, int]:
    """Return a number for the word of every kind of thing in alfworld."""
    constants = packaged.constants()
    words = sorted({name.lower() for name in constants.OBJECTS_SET | constants.RECEPTACLES})
    return {word: number for number, word in enumerate(words)}


@lru_cache(512)
def draw(cells: tuple[str | None, ...], size: int) -> EncodedImage:
    """Draw `cells` as a square image of `size` pixels. Empty cells are black, and equal arguments give equal images."""
    image, side = Image.new("RGB", (size, size)), size // GRID
    pen = ImageDraw.Draw(image)
    for index, kind in enumerate(cells):
        if kind is None:
            continue
        number = kinds().get(kind, len(kinds()))
        x, y = side * (index % GRID), side * (index // GRID)
        upper, lower = COLORS[number % len(COLORS)], COLORS[number // len(COLORS) % len(COLORS)]
        pen.rectangle((x, y, x + side - 2, y + side // 2 - 1), upper)
        pen.rectangle((x, y + side // 2, x + side - 2, y + side - 2), lower)
    return encode_png(image)


# --- Demonstrations that search for an object, as a policy must that does not know where it is ---

_REACHED = re.compile(r"\(receptacleatlocation (\S+) ([^\s)]+)\)")


def with_detours(plan: Sequence[str], problem: str, most: int, random: Random) -> list[str]:
    """Return `plan` after 0 to `most` visits to places where its first object could be but is not.

    The number of visits is drawn evenly. Closed places are opened. A place is skipped if the next one is reached from
    the same spot, because the game has no command to go where the agent already stands. A policy that learns only from
    plans that go straight to an object never sees a place without it.
    """
    taken = next((command for command in plan if command.startswith("take ")), "")
    target, _, host = taken.removeprefix("take ").partition(" from ")
    if not host:
        return list(plan)
    constants = packaged.constants()
    classes = {name.lower(): name for name in constants.OBJECTS_SET | constants.RECEPTACLES}
    names = names_of(problem)
    places = {name: classes.get(name.split()[0], "") for name in names.values()}
    reached = dict(_REACHED.findall(problem.lower()))
    standing = {name: reached.get(escaped(identity), name) for identity, name in names.items()}
    likely = sorted(
        name
        for name, kind in places.items()
        if name != host and kind in constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET
        if may_hold(kind, classes.get(target.split()[0], ""))
    )
    commands: list[str] = []
    visits = random.sample(likely, min(len(likely), random.randint(0, most)))
    for place, following in pairwise([*visits, host]):
        if standing[place] == standing[following]:
            continue
        commands.append(f"go to {place}")
        if places[place] in constants.OPENABLE_CLASS_SET:
            commands.append(f"open {place}")
    return [*commands, *(command for command in plan if command not in commands or not command.startswith("open "))]


# --- The environment ---


class AlfworldTextSettings(Settings):
    """Settings of the environment `alfworld/text`: the games, prompts, image and rewards."""

    games: GamesSettings = GeneratedGames(source="generated")
    """Source of the games."""
    heldout_source: Literal["valid_seen", "valid_unseen"] = "valid_seen"
    """Split of the held-out games: valid_seen has other games in scenes of the training split, valid_unseen has scenes
    that no training game uses."""
    prompt: PromptSettings = PromptSettings()
    """Templates of prompts, and rules for reading answers."""
    image: Annotated[NoImage | Schematic, Field(discriminator="form")] = NoImage(form="none")
    """Image to show before the text."""
    max_turns: PositiveInt = 50
    """Largest number of turns in an episode."""
    max_invalid_actions: NonNegativeInt = 0
    """Number of answers without an admissible action at which the episode is lost; 0, the usual setting, means no
    limit. A policy that is stuck repeats one action in all remaining turns, from which it learns only noise."""
    won_weight: float = 10.0
    """Reward for reaching the goal, given in the turn that reaches it."""
    detours: NonNegativeInt = 2
    """Most places that a demonstration visits in vain before it goes to its first object. With 0, a policy that learns
    from demonstrations never sees a place without the object."""


class AlfworldText:
    """An environment of text games. The games run in `processes` processes that start at the first reset.

    Each process plays many games, and all open environments of this kind share them.

    The anchor of step-level groups is the engine's text alone, without the history and the image.
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
        """Return the episode of a task.

        Raises:
            DataError: the payload's problem or goal is not safe to give to the engine.
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
        """Release the processes, which end with the last environment or episode that uses them."""
        self._host = None


class TextEpisode:
    """An episode of a text game. Its methods block until the game's process has answered."""

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
        """Play the command in an answer. A command that is not admissible is played too: then nothing happens."""
        read = parse_action(action, self._settings.prompt.thinking)
        defect: ActionDefect | None = "format" if read.defect else None
        if defect is None and read.action not in self._shown.commands:
            defect = "inadmissible"
        self._shown = self._game.step(read.action)
        self._dialogue.record_action(read.action, self._shown.feedback)
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
