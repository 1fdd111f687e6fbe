"""The stage `policy`: write a tiny checkpoint, or a reference to an existing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.hub import HUB, commit_of
from armature.components.machine.project import project_source
from armature.components.robots.policies.settings import RobotPolicySettings


def run_policy(
    settings: RobotPolicySettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Write a policy to `out`.

    It is `checkpoint/` for a tiny one, `source.json` and `policy.json` for a folder or hub name, and `policy.json` for
    one behind a server.

    Weights of a folder or hub name are not copied; `load_policy(out)` follows the reference. `policy.json` holds the
    settings, completed by the checkpoint's entry `norm_tag` or by the settings that LeRobot saved.

    Raises:
        ConfigurationError: no source or more than one is set, a hub name has no revision, or norm_tag is unknown.
        DataError: the folder or repository does not exist, or a file of the checkpoint is missing or invalid.
    """
    from armature.components.models.source import make_reference
    from armature.components.robots.policies.family import family
    from armature.components.robots.policies.source import POLICY, policy_source, write_settings

    source = policy_source(settings)
    if settings.external is not None:
        if settings.lerobot is not None:
            make_reference(source, None, POLICY).write(out)
        write_settings(out, settings)
        return StageReport()
    if settings.tiny is not None:
        family(settings.family).make_tiny_policy(out / "checkpoint", settings)
        context.events.message(f"policy: made a tiny {settings.family} from seed {settings.tiny.seed}")
        return StageReport()
    reference = make_reference(source, settings.revision, POLICY)
    parts = family(settings.family).load_parts(source, settings)
    reference.write(out)
    write_settings(out, parts.settings)
    commit = f" at {reference.commit}" if reference.commit else ""
    context.events.message(f"policy: refers to {source}{commit}")
    return StageReport()


def policy_sources(settings: RobotPolicySettings, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Return the digests of the local checkpoint folder in `settings`, which enter the stage's fingerprint.

    The result is {} if the policy does not come from a local folder.
    """
    from armature.components.models.source import folder_sources
    from armature.components.robots.policies.source import POLICY

    source = settings.lerobot.path if settings.lerobot is not None else settings.path or settings.checkpoint_path
    return folder_sources(source, POLICY) if source and settings.tiny is None else {}


def at_commits(
    settings: RobotPolicySettings, inputs: Mapping[str, Artifact], say: Callable[[str], None]
) -> RobotPolicySettings:
    """Return `settings` with branch and tag names of hub repositories replaced by commits.

    Raises:
        DataError: see `commit_of`.
    """
    named = {
        "revision": settings.path or settings.checkpoint_path,
        "checkpoint_revision": settings.path and settings.checkpoint_path,
        "action_tokenizer_revision": settings.action_tokenizer,
    }
    commits = {}
    for key, name in named.items():
        revision = getattr(settings, key)
        if name and revision is not None and HUB.fullmatch(name) and not Path(project_source(name)).is_dir():
            commits[key] = commit_of(name, revision, "model", say)
    return settings.model_copy(update=commits)


POLICY_STAGE = Stage("policy", 3, RobotPolicySettings, (), run_policy, policy_sources, at_commits)
