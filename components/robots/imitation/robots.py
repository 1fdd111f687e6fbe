"""The robots of a mixture: a processor for each tag, and what is saved of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.datasets.source import ACTION, STATE, DatasetSource
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts, load_parts
from armature.components.robots.policies.molmoact2.processing.norm_stats import (
    NormStats,
    RobotMetadata,
    norm_stats,
    robot_metadata,
)
from armature.components.robots.policies.molmoact2.processing.processor import Processor
from armature.components.robots.policies.settings import RobotPolicySettings


@dataclass(frozen=True)
class RobotsByTag:
    """Per tag of the datasets.

    measured: what the datasets' own statistics say. parts: a checkpoint's parts, settings and normalization being the
    tag's. horizon: actions of an example, the longest chunk of all.
    """

    measured: Mapping[str, RobotMetadata]
    parts: Mapping[str, PolicyParts]
    horizon: int

    def processors(self) -> dict[str, Processor]:
        return {tag: parts.processor(self.horizon) for tag, parts in self.parts.items()}

    def saved(self) -> PolicyParts:
        """What a checkpoint keeps: of one robot its statistics, of several those of all, to be chosen by norm_tag."""
        first, *others = self.parts.values()
        if not others:
            return first
        robots = {tag: _robot(parts) for tag, parts in self.parts.items()}
        stats: NormStats = norm_stats(robots, first.settings)
        settings = first.settings.model_copy(update={"chunk_size": self.horizon})
        return replace(first, robot=None, stats=stats, settings=settings)


def robots_of(
    policy: Path,
    settings: RobotPolicySettings,
    sources: Sequence[DatasetSource],
    statistics: Mapping[str, Mapping[str, Any]],
) -> RobotsByTag:
    """
    Args:
        policy: a checkpoint, or an artifact that has or names one.
        statistics: LeRobot's stats.json by tag.

    Raises:
        ConfigurationError: sources of one tag differ in their horizon, or a norm_tag is to serve several tags or has
            another horizon than they.
        DataError: a tag has no statistics, or they do not fit its datasets.
    """
    by_tag = _by_tag(sources, settings.chunk_size)
    if len(by_tag) > 1 and settings.norm_tag:
        raise ConfigurationError(
            f"norm_tag {settings.norm_tag!r} is one robot, and the datasets have {', '.join(by_tag)}",
            code="norm_tag_ambiguous",
            where="policy.norm_tag",
            remedy="leave it out: each dataset's own statistics are used",
        )
    measured, parts = {}, {}
    for tag, source in by_tag.items():
        if tag not in statistics:
            raise DataError(
                f"no statistics for the tag {tag!r}",
                code="statistics_missing",
                where=str(source.dataset.files),
                remedy=f"run quantile-stats on the same datasets; these are of {', '.join(statistics)}",
            )
        chunk = source.horizon or settings.chunk_size
        steps = min(settings.n_action_steps, chunk)
        own = settings.model_copy(update={"chunk_size": chunk, "n_action_steps": steps})
        measured[tag] = _measured(source, statistics[tag], own)
        parts[tag] = load_parts(policy, own, measured[tag])
        if (told := parts[tag].settings.chunk_size) != chunk:
            raise ConfigurationError(
                f"norm_tag {settings.norm_tag!r} predicts {told} actions at once, the dataset's windows have {chunk}",
                code="horizon_mismatch",
                where=f"policy.chunk_size = {settings.chunk_size}, horizon of {tag!r}: {source.horizon}",
                remedy=f"set policy.chunk_size = {told}, and no other horizon for the dataset",
            )
    horizon = max(each.settings.chunk_size for each in parts.values())
    longest = {
        tag: replace(each, config=each.config.model_copy(update={"max_action_horizon": horizon}))
        if each.config.max_action_horizon < horizon
        else each
        for tag, each in parts.items()
    }
    return RobotsByTag(measured, longest, horizon)


def _by_tag(sources: Sequence[DatasetSource], chunk: int) -> dict[str, DatasetSource]:
    """One source of each tag, all of whose sources have its horizon."""
    found: dict[str, DatasetSource] = {}
    for source in sources:
        first = found.setdefault(source.tag, source)
        if (first.horizon or chunk) != (source.horizon or chunk):
            raise ConfigurationError(
                f"datasets of the tag {source.tag!r} have the horizons {first.horizon} and {source.horizon}",
                code="horizon_mismatch",
                where="dataset.sources",
                remedy="give them one horizon, or tags of their own",
            )
    return found


def _measured(source: DatasetSource, statistics: Mapping[str, Any], settings: RobotPolicySettings) -> RobotMetadata:
    """Under the names that a policy has for state and action, whatever the dataset calls them."""
    names = {ACTION: source.action} | ({STATE: source.state} if source.state else {})
    features = {name: source.dataset.feature(own) for name, own in names.items()}
    features |= {camera: source.dataset.feature(own) for camera, own in source.cameras.items()}
    renamed = {name: statistics[own] for name, own in names.items() if own in statistics}
    return robot_metadata(renamed, features, settings)


def _robot(parts: PolicyParts) -> RobotMetadata:
    assert parts.robot is not None
    return parts.robot
