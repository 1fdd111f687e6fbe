"""Metadata, checkpoint parts and processors of the robots in a mixture of datasets, by tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.datasets.source import ACTION, STATE, DatasetSource
from armature.components.robots.policies.family import family
from armature.components.robots.policies.inputs import ModelProcessor
from armature.components.robots.policies.norm_stats import RobotMetadata, dimension_names, robot_metadata
from armature.components.robots.policies.settings import RobotPolicySettings


@dataclass(frozen=True)
class RobotsByTag:
    """Robots of a mixture of datasets. Each dataset has a tag, which names its robot.

    measured: metadata of each tag's robot, with statistics measured on the datasets.
    parts: parts of the checkpoint, with settings and normalization for each tag's robot.
    horizon: number of actions of an encoded example: the length of the longest chunk of all robots.
    """

    measured: Mapping[str, RobotMetadata]
    parts: Mapping[str, Any]
    horizon: int

    def processors(self) -> dict[str, ModelProcessor]:
        """Return a processor for each tag, all with the same horizon."""
        return {tag: parts.processor(self.horizon) for tag, parts in self.parts.items()}

    def saved(self) -> Any:
        """Return the parts to save in the trained checkpoint.

        With several robots, the parts hold the statistics of every robot, and a user of the checkpoint selects a robot
        by its norm_tag.
        """
        first, *others = self.parts.values()
        if not others:
            return first
        return family(first.settings.family).join(self.parts, self.horizon)


def robots_of(
    policy: Path,
    settings: RobotPolicySettings,
    sources: Sequence[DatasetSource],
    statistics: Mapping[str, Mapping[str, Any]],
) -> RobotsByTag:
    """Read the checkpoint's parts for each tag of the datasets.

    Args:
        policy: A checkpoint, or an artifact that contains or refers to one.
        statistics: Content of LeRobot's stats.json by tag.

    Raises:
        ConfigurationError: sources of one tag have different horizons, or `settings.norm_tag` is set and there are
            several tags, or its horizon differs from the dataset's.
        DataError: a tag has no statistics, or they do not fit its datasets.
    """
    by_tag = _by_tag(sources, settings.chunk_size)
    if len(by_tag) > 1 and settings.norm_tag:
        raise ConfigurationError(
            f"norm_tag {settings.norm_tag!r} names one robot, but the datasets have several: {', '.join(by_tag)}",
            code="norm_tag_ambiguous",
            where="policy.norm_tag",
            remedy="remove it to use each dataset's own statistics",
        )
    kind, measured, parts = family(settings.family), {}, {}
    if len(by_tag) > 1 and not hasattr(kind, "join"):
        raise ConfigurationError(
            f"a {settings.family} has the statistics of one robot, and the datasets have several: {', '.join(by_tag)}",
            code="robots_unsupported",
            where="dataset.sources",
            remedy="give all datasets of a robot the same tag, or train a MolmoAct2",
        )
    for tag, source in by_tag.items():
        if tag not in statistics:
            raise DataError(
                f"there are no statistics for the tag {tag!r}",
                code="statistics_missing",
                where=str(source.dataset.files),
                remedy=f"run quantile-stats on the same datasets; these statistics are of {', '.join(statistics)}",
            )
        chunk = source.horizon or settings.chunk_size
        steps = min(settings.n_action_steps, chunk)
        tag_settings = settings.model_copy(update={"chunk_size": chunk, "n_action_steps": steps})
        measured[tag] = _measured(source, statistics[tag], tag_settings)
        parts[tag] = kind.load_parts(policy, tag_settings, measured[tag])
        if (predicted := parts[tag].settings.chunk_size) != chunk:
            raise ConfigurationError(
                f"norm_tag {settings.norm_tag!r} predicts {predicted} actions, the dataset's windows have {chunk}",
                code="horizon_mismatch",
                where=f"policy.chunk_size = {settings.chunk_size}, horizon of {tag!r}: {source.horizon}",
                remedy=f"set policy.chunk_size = {predicted}, and no other horizon for the dataset",
            )
    horizon = max(each.settings.chunk_size for each in parts.values())
    if len(parts) > 1:
        parts = {tag: kind.with_horizon(each, horizon) for tag, each in parts.items()}
    return RobotsByTag(measured, parts, horizon)


def _by_tag(sources: Sequence[DatasetSource], chunk: int) -> dict[str, DatasetSource]:
    """Return the first source of each tag, after checking that all sources of a tag are of the same robot."""
    by_tag: dict[str, DatasetSource] = {}
    for source in sources:
        first = by_tag.setdefault(source.tag, source)
        if (first.horizon or chunk) != (source.horizon or chunk):
            raise ConfigurationError(
                f"datasets of the tag {source.tag!r} have the horizons {first.horizon} and {source.horizon}",
                code="horizon_mismatch",
                where="dataset.sources",
                remedy="set the same horizon for both, or give them different tags",
            )
        _refuse_other_robot(first, source)
    return by_tag


def _refuse_other_robot(first: DatasetSource, source: DatasetSource) -> None:
    """Check that two datasets of a tag have the same frequency, and their dimensions in the same order."""

    def names(each: DatasetSource, column: str | None) -> tuple[str, ...]:
        return (dimension_names(each.dataset.feature(column)) or ()) if column is not None else ()

    one, other = ({"state": names(each, each.state), "action": names(each, each.action)} for each in (first, source))
    wrong = [name for name in one if one[name] != other[name] and sorted(one[name]) == sorted(other[name])]
    rates = [each.dataset.info.fps for each in (first, source)]
    if wrong or abs(rates[0] - rates[1]) > 0.01 * rates[0]:
        what, values = (wrong[0], (one[wrong[0]], other[wrong[0]])) if wrong else ("fps", rates)
        raise ConfigurationError(
            f"{what} is {values[0]} in one dataset of the tag {source.tag!r} and {values[1]} in another",
            code="robots_of_tag_differ",
            where=f"{first.dataset.files}, {source.dataset.files}",
            remedy="give datasets of different robots different tags, or convert one of them",
        )


def _measured(source: DatasetSource, statistics: Mapping[str, Any], settings: RobotPolicySettings) -> RobotMetadata:
    """Return the metadata of a dataset's robot, with the dataset's columns renamed to the policy's feature names."""
    names = {ACTION: source.action} | ({STATE: source.state} if source.state else {})
    features = {name: source.dataset.feature(column) for name, column in names.items()}
    features |= {camera: source.dataset.feature(column) for camera, column in source.cameras.items()}
    renamed = {name: statistics[column] for name, column in names.items() if column in statistics}
    robot = robot_metadata(renamed, features, settings)
    if robot.action_stats.min == robot.action_stats.max is not None:
        raise DataError(
            f"no dimension of {source.action!r} ever changes, so there is nothing to learn",
            code="constant_actions",
            where=str(source.dataset.files),
            remedy="name the right feature (dataset.sources, action), or select other episodes",
        )
    return robot
