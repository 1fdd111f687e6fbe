"""Opening the policy of an evaluation: one of this process, or one that another program computes."""

from __future__ import annotations

from pathlib import Path

from armature.components.contracts.machine import available_cpus
from armature.components.models.source import locate
from armature.components.robots.evaluation.robot import SimulatedRobot, libero_robot, refuse_cameras, refuse_unfit
from armature.components.robots.evaluation.settings import EvaluateLiberoStageSettings, PolicyEvaluationSettings
from armature.components.robots.policies.family import family_at
from armature.components.robots.policies.lerobot.process import LeRobotPolicy
from armature.components.robots.policies.player import FlowPolicy
from armature.components.robots.policies.settings import LeRobotPolicySettings, ServedPolicySettings
from armature.components.robots.policies.source import POLICY
from armature.components.robots.server.client import ServedPolicy


def open_own(source: Path, settings: EvaluateLiberoStageSettings) -> FlowPolicy:
    """Load the policy of an artifact into this process, to play in LIBERO.

    Raises:
        ConfigurationError: see `load_own`, or the simulator lacks one of the policy's cameras.
        DataError: the checkpoint is incomplete.
    """
    policy = load_own(source, settings.evaluation)
    refuse_cameras(policy.cameras, settings.simulator)
    return policy


def load_own(source: Path, plan: PolicyEvaluationSettings) -> FlowPolicy:
    """Load the policy of an artifact into this process.

    Raises:
        ConfigurationError: the policy does not support the action mode.
        DataError: the checkpoint is incomplete.
    """
    return family_at(source).open_policy(
        source,
        mode=plan.inference_action_mode,
        rows=plan.rows_per_pass,
        torch_compile=plan.torch_compile,
        quantization=plan.quantization,
        n_action_steps=plan.n_action_steps,
        num_inference_steps=plan.num_inference_steps,
        image_attention=plan.image_attention_at_inference,
    )


def open_external(
    external: ServedPolicySettings | LeRobotPolicySettings,
    source: Path,
    settings: EvaluateLiberoStageSettings,
    threads: int,
) -> ServedPolicy | LeRobotPolicy:
    """Connect to a policy of another program that plays in LIBERO, see `connect_external`."""
    return connect_external(external, source, libero_robot(settings.simulator), settings.evaluation, threads)


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
        ConfigurationError: see `refuse_unfit`, `ServedPolicy` and `LeRobotPolicy`.
        DataError: the checkpoint of LeRobot is invalid, or has changed since the artifact was made.
        ServerError: see `ServedPolicy`.
    """
    refuse_unfit(external, robot, plan)
    if isinstance(external, LeRobotPolicySettings):
        folder = locate(source, kind=POLICY)
        return LeRobotPolicy(external, folder, plan.n_action_steps, plan.rows_per_pass, threads or available_cpus())
    cameras = [robot.cameras[camera] for camera in external.conventions.cameras]
    return ServedPolicy(external, cameras, plan.n_action_steps, plan.rows_per_pass)
