"""What everything of a robot policy that learns by trying costs."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from armature.components.contracts.settings import Settings
from armature.components.planning.costs import CostTables


class SimulatorCosts(Settings):
    """Seconds of a process, which does one thing at a time for all of its simulators."""

    build_seconds: NonNegativeFloat = Field(description="Seconds of a reset that has to build the task's simulator.")
    reset_seconds: NonNegativeFloat = Field(description="Seconds of any other reset.")
    action_seconds: NonNegativeFloat = Field(description="Seconds of an action, with its part of the images.")


class PolicyCosts(Settings):
    """A call answers who waits in one forward pass, which is as long as a full one."""

    pass_seconds: NonNegativeFloat = Field(description="Seconds of a forward pass, with all of its denoising.")
    rows: PositiveInt = Field(description="Answers of a forward pass: rows_per_pass on a GPU, 1 on a CPU.")


class RobotTrainerCosts(Settings):
    """An update takes as long as the rank with the most answers."""

    answer_seconds: NonNegativeFloat = Field(description="Seconds of a rank for an answer, forward and backward.")
    gather_seconds: NonNegativeFloat = Field(
        0.0, description="Seconds to gather the weights and scatter the gradients of a micro-batch; it takes no less."
    )
    update_seconds: NonNegativeFloat = Field(0.0, description="Seconds of the optimizer, whatever an update has.")


class RobotFlowCosts(Settings):
    """The process of the run."""

    answer_seconds: NonNegativeFloat = Field(
        0.0, description="Seconds that a player needs for an answer: to encode what is seen, and to keep both."
    )
    batch_answer_seconds: NonNegativeFloat = Field(0.0, description="Seconds for an answer in the batch of a step.")
    batch_seconds: NonNegativeFloat = Field(0.0, description="Seconds of a batch, however few answers it has.")
    step_seconds: NonNegativeFloat = Field(0.0, description="Seconds of a step's rollouts, however few there are.")


class RobotCosts(CostTables):
    """Seconds of everything that the loop waits for."""

    simulators: SimulatorCosts
    policy: PolicyCosts
    trainer: RobotTrainerCosts
    flow: RobotFlowCosts
    sync_seconds: NonNegativeFloat = Field(
        description="Seconds to write the trainer's weights, and a checkpoint if one is due, and to load them."
    )

    @classmethod
    def nothing(cls) -> RobotCosts:
        """Nothing takes any time."""
        return cls(
            simulators=SimulatorCosts(build_seconds=0.0, reset_seconds=0.0, action_seconds=0.0),
            policy=PolicyCosts(pass_seconds=0.0, rows=1),
            trainer=RobotTrainerCosts(answer_seconds=0.0),
            flow=RobotFlowCosts(),
            sync_seconds=0.0,
        )
