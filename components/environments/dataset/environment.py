"""The environment `dataset`: each row of a table is a task of one turn, graded by named rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from armature.components.artifacts.videos import FrameSettings
from armature.components.contracts.episodes import EarlierMessage, Episode, Observation, Outcome, Split, Task
from armature.components.contracts.errors import ConfigurationError, DataError, RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.environments.dataset.bad_rows import BadRow, BadRows
from armature.components.environments.dataset.files import DataFiles
from armature.components.environments.dataset.rows import RowExample, demonstration_of, example_of, row_for_rewards
from armature.components.environments.dataset.select import RowReference, image_paths, select_rows
from armature.components.environments.dataset.settings import DatasetEnvironmentSettings
from armature.components.environments.dataset.shards import Row
from armature.components.environments.dataset.source import (
    image_names,
    open_table,
    refuse_missing_source,
    table_at_commit,
)
from armature.components.environments.dataset.template import Place, parse_template
from armature.components.machine.project import project_folder
from armature.components.rewards.callables import CallableReward
from armature.components.rewards.make import Rewards, make_rewards, refuse_missing_answer, reward_sources
from armature.components.rewards.reward import RewardInput

TASK_FIELDS = ("file", "row", "digest")
"""Fields of a task's payload that refer to its row."""


class DatasetEnvironment:
    """An environment with one task of one turn per row of a table.

    A task refers to its row by file, position and digest, so a change of the table is noticed. The choice of held-out
    rows and the order of tasks do not depend on the order of the rows.

    Raises:
        ConfigurationError, DataError: see `open_table` and `make_rewards`.
    """

    name: ClassVar[str] = "dataset"
    Settings: ClassVar[type[DatasetEnvironmentSettings]] = DatasetEnvironmentSettings
    knows_its_tasks: ClassVar[bool] = True
    system_prompt: ClassVar[None] = None
    dialogue: ClassVar[bool] = True
    max_turns: int = 1

    def __init__(
        self,
        settings: DatasetEnvironmentSettings,
        *,
        train_tasks: int | None,
        heldout_tasks: int | None,
        seed: int,
        processes: int,
        callables: Sequence[CallableReward] = (),
    ) -> None:
        """Open the table and make the rewards: those that the settings name, and `callables`."""
        self.settings = settings
        self._counts: dict[Split, int | None] = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed = seed
        self._table = open_table(settings)
        self._shards = self._table.shards  # open them now: it may take longer than an episode's time limit allows
        self._bad = BadRows(f"source {settings.source!r}", settings.on_bad_row)
        self._rewards: Rewards = make_rewards(
            settings.rewards, folder=project_folder(), processes=processes, callables=callables
        )
        self.reward_weights: Mapping[str, float] = self._rewards.weights

    @staticmethod
    def sources(settings: DatasetEnvironmentSettings) -> dict[str, str]:
        """Return digests of the table, of the images that are files, and of the sources of the rewards.

        Raises:
            ConfigurationError, DataError: see `open_table`.
        """
        table = open_table(settings)
        unused = {"rewards", "split", "filters", "check_images", "on_bad_row"}
        used = settings.model_dump(mode="json", exclude=unused | {"reserved_tokens", "allow_special_tokens"})
        names = image_names(table, used, lambda: image_paths(table, settings))
        images = table.files.digest(names)
        return {"data": table.digest, "images": images, **reward_sources(settings.rewards)}

    @staticmethod
    def at_commit(settings: DatasetEnvironmentSettings, say: Callable[[str], None]) -> DatasetEnvironmentSettings:
        """Return the settings with the commit in place of a branch or tag of a Hugging Face dataset.

        Raises:
            DataError: see `hub_commit`.
        """
        return table_at_commit(settings, say)

    @staticmethod
    def refuse_ahead(settings: DatasetEnvironmentSettings, kind_field: str, most_images: int, most_videos: int) -> None:
        """Check source, rewards, images and `kind_field` without reading rows; see `environments.make.refuse_ahead`.

        Raises:
            ConfigurationError: a reward cannot be made, or the settings contradict `evaluation` or `inference`.
            DataError: the source does not exist.
        """
        refuse_missing_source(settings)
        fields = [*TASK_FIELDS, *(["kind"] if settings.kind else [])]
        if kind_field and kind_field not in fields:
            raise ConfigurationError(
                f"the rows have no field {kind_field!r} to break results down by",
                code="unknown_kind_field",
                where="evaluation.kind_field, environment.args.kind",
                remedy='name a column in environment.args.kind and set evaluation.kind_field = "kind", or set it to ""',
            )
        places = parse_template(settings.prompt).parts.count(Place.IMAGE)
        if places > most_images + most_videos:  # a video takes the place of an image
            raise ConfigurationError(
                f"the prompt has places for {places} images, but servers accept {most_images} in a prompt",
                code="too_many_images",
                where="environment.args.prompt, inference.max_images_per_prompt",
                remedy=f"set inference.max_images_per_prompt = {places}",
            )
        make_rewards(settings.rewards, folder=project_folder()).close()
        if not (settings.answer or settings.conversation):
            remedy = 'name its column: answer = "label"'
            refuse_missing_answer(settings.rewards, project_folder(), "environment.args.answer", remedy)

    @property
    def drops(self) -> dict[str, int]:
        """Number of rows that were left out so far, by reason."""
        return dict(self._bad.left_out)

    @cached_property
    def _selected(self) -> dict[Split, list[RowReference]]:
        return select_rows(self._table, self.settings, self._rewards, self._counts, self._seed, self._bad)

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, each in enumerate(self._selected[split]):
            payload = dict(zip(TASK_FIELDS, (each.shard, each.row, each.digest), strict=True))
            kind = {"kind": each.kind} if self.settings.kind else {}
            yield Task(f"{self.name}-{split}-{number:05d}", split, payload | kind)

    def demonstration(self, task: Task) -> list[str]:
        row, example = self._row(task)
        answer = demonstration_of(row, example, self.settings)
        return [answer] if answer else []

    def episode(self, task: Task) -> Episode:
        """Return the episode of a task; see `row_episode`."""
        return self.row_episode(task)

    def row_episode(self, task: Task) -> DatasetEpisode:
        """Return an episode that shows the row of a task and grades one answer.

        Raises:
            DataError: the row has changed since the task was made.
        """
        row, example = self._row(task)
        shown = row_for_rewards(row, self.settings)
        return DatasetEpisode(example, self._table.files, self.settings.frames, shown, self._rewards)

    def close(self) -> None:
        self._rewards.close()

    def _row(self, task: Task) -> tuple[Row, RowExample]:
        name, index = task.payload["file"], task.payload["row"]
        changed = DataError(
            f"row {index} of {name} has changed since the task was made",
            code="row_changed",
            where=task.task_id,
            remedy="restore the data, or make the tasks again",
        )
        shard = self._shards.get(name)
        if shard is None:
            raise changed
        try:
            row = shard.row(index)
            example = example_of(row, self.settings)
        except BadRow as error:
            raise changed from error
        if example.digest != task.payload["digest"]:
            raise changed
        return row, example


class DatasetEpisode:
    """An episode of one turn: it shows a row and grades the answer."""

    def __init__(
        self, example: RowExample, files: DataFiles, frames: FrameSettings, row: dict[str, Any], rewards: Rewards
    ) -> None:
        self._example, self._files, self._frames, self._rewards = example, files, frames, rewards
        self.row = row

    async def reset(self) -> Observation:
        """Load the row's images and return the observation.

        Raises:
            RolloutFailed: an image or video is missing or damaged (`bad_image`, `bad_video`).
        """
        *earlier, (_, content) = [
            (role, tuple(part if isinstance(part, str) else self._load(part) for part in parts))
            for role, parts in self._example.messages
        ]
        return Observation(content, earlier=tuple(EarlierMessage(role, parts) for role, parts in earlier))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, await self.grade(action, self.row))

    async def grade(self, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the rewards of an answer by label. `row` has the columns that rewards see."""
        return await self._rewards.grade(RewardInput(answer, self._example.answer, row))

    async def close(self) -> None:
        pass

    def _load(self, image: Any) -> EncodedImage:
        try:
            loaded: EncodedImage = image.load(self._files, self._frames)
            return loaded
        except BadRow as bad:
            raise RolloutFailed("bad_video" if bad.reason == "bad_video" else "bad_image", bad.detail) from bad
