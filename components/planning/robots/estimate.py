"""Costs of a robot policy that nobody measured: from a data sheet, its sizes, and what was measured of others."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from armature.components.contracts.settings import Settings
from armature.components.environments.libero.settings import SimulatorSettings
from armature.components.planning.gpus import Gpu
from armature.components.planning.robots.costs import (
    PolicyCosts,
    RobotCosts,
    RobotFlowCosts,
    RobotTrainerCosts,
    SimulatorCosts,
)
from armature.components.planning.robots.geometry import PolicyGeometry
from armature.components.vla_rl.settings import RobotRLTrainerSettings, RobotRolloutSettings

BENCHMARKS = "docs/benchmarks.md"
POLICIES, TRYING = (
    BENCHMARKS + ", MolmoAct2 of the released sizes",
    BENCHMARKS + ", Robot policies that learn by trying",
)


class RobotAssumptions(Settings):
    """What is not on a data sheet. The descriptions say where each is from."""

    policy_mfu: PositiveFloat = Field(
        0.412, description="measured: of the FLOPs, 9.84 ms more for each row of an answer on an H200, " + POLICIES
    )
    layer_seconds: NonNegativeFloat = Field(
        0.0231 / 360, description="measured: 33 ms for a row, less its FLOPs, by layer and denoising step, " + POLICIES
    )
    expert_mfu: PositiveFloat = Field(
        0.228,
        description="measured: 575 ms for 32 examples of the expert alone on an H200, by the VLM's FLOPs, " + POLICIES,
    )
    full_mfu: PositiveFloat = Field(
        0.32,
        description="measured: 0.304 of LoRA and 0.337 of all weights on an H200, with what is computed again, "
        + POLICIES,
    )
    fp8_time: PositiveFloat = Field(
        0.8,
        description="measured: of the time of a further row, 7.6 ms in fp8 and 9.7 ms in bf16 on an H200, " + TRYING,
    )
    micro_batch_seconds: NonNegativeFloat = Field(
        0.31 / 36,
        description="measured: 0.31 s of a micro-batch, however few its examples, on an H200, by layer, " + POLICIES,
    )
    action_seconds: NonNegativeFloat = Field(
        0.015, description="measured: 0.013 to 0.017 s of a core for an action, all 16 being busy, " + TRYING
    )
    waiting_seconds: NonNegativeFloat = Field(
        0.01, description="assumed: of a core for a step of waiting after a reset, which is not drawn"
    )
    reset_seconds: NonNegativeFloat = Field(
        0.2,
        description="assumed: of a core for a reset, without its waiting: with it half of the 0.6 s that were "
        "measured when a reset compiled its task, " + TRYING,
    )
    build_seconds: NonNegativeFloat = Field(
        2.5, description="measured: 2.1 to 2.8 s of a core to build a task's simulator, all 16 being busy, " + TRYING
    )
    keep_seconds: NonNegativeFloat = Field(0.01, description="assumed: to encode and store the images of an answer")
    batch_answer_seconds: NonNegativeFloat = Field(1e-4, description="assumed: for an answer in the batch of a step")
    network_share: PositiveFloat = Field(0.7, description="assumed: of NVLink and network, in collectives")
    memory_share: PositiveFloat = Field(0.7, description="assumed: of the memory bandwidth, in the optimizer")
    write_bandwidth: PositiveFloat = Field(
        1e9, description="assumed: bytes/s of weights that are written to a folder, and read from it"
    )


def estimated_robot_costs(
    sizes: PolicyGeometry,
    gpu: Gpu,
    said: RobotAssumptions,
    rollouts: RobotRolloutSettings,
    trainer: RobotRLTrainerSettings,
    simulator: SimulatorSettings,
    ranks: int,
) -> RobotCosts:
    """Costs of a policy of `sizes` on `gpu`: a row takes 2 operations for each weight and token of its prompt,
    in 8 bits less time.

    With `trainer.mode` expert an answer takes that once; else backward and what is computed again as well, 8 in all. A
    trainer of several ranks gathers all weights twice and scatters the gradients of those that are trained.
    """
    expert, row = trainer.mode == "expert", 2 * sizes.met * sizes.tokens
    fp8 = rollouts.quantization is not None
    played = row * (said.fp8_time if fp8 else 1.0)
    trained = sizes.expert if expert else sizes.parameters
    held = sizes.vlm * sizes.width + 4 * sizes.expert
    link = gpu.collective(ranks) * said.network_share
    answer = played / (gpu.flops * said.expert_mfu) if expert else 4 * row / (gpu.flops * said.full_mfu)
    micro = said.micro_batch_seconds * sizes.layers
    costs = RobotCosts(
        simulators=SimulatorCosts(
            build_seconds=said.build_seconds + simulator.num_steps_wait * said.waiting_seconds,
            reset_seconds=said.reset_seconds + simulator.num_steps_wait * said.waiting_seconds,
            action_seconds=said.action_seconds,
        ),
        policy=PolicyCosts(
            pass_seconds=said.layer_seconds * sizes.layers * sizes.denoising
            + rollouts.rows_per_pass * played / (gpu.flops * said.policy_mfu),
            rows=rollouts.rows_per_pass,
        ),
        trainer=RobotTrainerCosts(
            answer_seconds=answer,
            gather_seconds=max(micro, 0.0 if ranks == 1 else (2 * held + 4 * trained) / link),
            update_seconds=32 * trained / ranks / (gpu.memory_bandwidth * said.memory_share),
        ),
        flow=RobotFlowCosts(answer_seconds=said.keep_seconds, batch_answer_seconds=said.batch_answer_seconds),
        sync_seconds=2 * held / said.write_bandwidth,
    )
    return costs.model_copy(update={"sources": _sources(gpu, said, expert, fp8)})


def _sources(gpu: Gpu, said: RobotAssumptions, expert: bool, fp8: bool) -> dict[str, str]:
    fields = type(said).model_fields

    def of(*names: str) -> str:
        return "; ".join(f"{name} = {getattr(said, name):.3g}, {fields[name].description}" for name in names)

    sheet, of_fp8 = f"computed: sizes of the policy, {gpu.source}", ["fp8_time"] if fp8 else []
    return {
        "simulators.build_seconds": of("build_seconds", "waiting_seconds"),
        "simulators.reset_seconds": of("reset_seconds", "waiting_seconds"),
        "simulators.action_seconds": of("action_seconds"),
        "policy.pass_seconds": f"{sheet}; {of('policy_mfu', 'layer_seconds', *of_fp8)}",
        "policy.rows": "rollouts.rows_per_pass",
        "trainer.answer_seconds": f"{sheet}; {of('expert_mfu', *of_fp8) if expert else of('full_mfu')}",
        "trainer.gather_seconds": f"{sheet}; {of('network_share', 'micro_batch_seconds')}",
        "trainer.update_seconds": f"{sheet}; {of('memory_share')}",
        "flow.answer_seconds": of("keep_seconds"),
        "flow.batch_answer_seconds": of("batch_answer_seconds"),
        "sync_seconds": f"{sheet}; {of('write_bandwidth')}",
    }
