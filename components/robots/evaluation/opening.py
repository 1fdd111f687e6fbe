"""Opening the policy of an evaluation: one of this process, or one that another program computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armature.components.contracts.machine import available_cpus
from armature.components.contracts.stages import StageContext
from armature.components.models.source import locate
from armature.components.robots.evaluation.robot import (
    SimulatedRobot,
    refuse_cameras,
    refuse_disagreement,
    refuse_external,
)
from armature.components.robots.evaluation.settings import PolicyEvaluationSettings
from armature.components.robots.policies.lerobot.process import LeRobotPolicy
from armature.components.robots.policies.player import FlowPolicy, open_flow_policy
from armature.components.robots.policies.settings import LeRobotPolicySettings, ServedPolicySettings
from armature.components.robots.policies.source import POLICY, read_settings
from armature.components.robots.server.client import ServedPolicy


def open_own(source: Path, robot: SimulatedRobot, plan: PolicyEvaluationSettings) -> FlowPolicy:
    """Load the policy of an artifact into this process.

    Raises:
        ConfigurationError: the policy does not support the action mode, the simulator lacks one of its cameras, or its
            states or actions have another number of dimensions.
        DataError: the checkpoint is incomplete.
    """
    policy = open_flow_policy(
        source,
        mode=plan.inference_action_mode,
        rows=plan.rows_per_pass,
        torch_compile=plan.torch_compile,
        quantization=plan.quantization,
        n_action_steps=plan.n_action_steps,
        num_inference_steps=plan.num_inference_steps,
        image_attention=plan.image_attention_at_inference,
    )
    refuse_cameras(policy.cameras, robot)
    sizes = {name: getattr(policy, name) for name in ("state_dimensions", "action_dimensions")}
    refuse_disagreement("the policy", sizes, "the simulator", robot.conventions.model_dump())
    return policy


@contextmanager
def open_policy(
    source: Path, robot: SimulatedRobot, plan: PolicyEvaluationSettings, context: StageContext
) -> Iterator[FlowPolicy | ServedPolicy | LeRobotPolicy]:
    """Open the policy of an artifact within the block: one of ours, or of another program.

    Raises:
        ConfigurationError, DataError, ServerError: see `open_own` and `connect_external`.
    """
    settings = read_settings(source)
    if settings is None or settings.external is None:
        yield open_own(source, robot, plan)
        return
    with connect_external(settings.external, source, robot, plan, context.machine.threads) as external:
        if not external.seeded:
            context.events.message("the policy's server draws its own noise, so another evaluation may differ")
        yield external


def connect_external(
    external: ServedPolicySettings | LeRobotPolicySettings,
    source: Path,
    robot: SimulatedRobot,
    plan: PolicyEvaluationSettings,
    threads: int,
) -> ServedPolicy | LeRobotPolicy:
    """Connect to a policy of another program, after checking that it fits the simulator.

    Args:
        source: artifact of the policy.
        threads: CPU threads of a process that computes the policy; 0: as many as there are cores.

    Raises:
        ConfigurationError: see `refuse_external`, `ServedPolicy` and `LeRobotPolicy`.
        DataError: the checkpoint of LeRobot is invalid, or has changed since the artifact was made.
        ServerError: see `ServedPolicy`.
    """
    refuse_external(external, robot, plan)
    if isinstance(external, LeRobotPolicySettings):
        folder = locate(source, kind=POLICY)
        return LeRobotPolicy(external, folder, plan.n_action_steps, plan.rows_per_pass, threads or available_cpus())
    cameras = [robot.cameras[camera] for camera in external.conventions.cameras]
    return ServedPolicy(external, cameras, plan.n_action_steps, plan.rows_per_pass)
