"""How GPUs are shared between servers and trainer, and whether a rank and a server fit."""

from __future__ import annotations

from dataclasses import dataclass

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.planning.costs import Costs
from armature.components.planning.estimate import Assumptions, estimated, mfu_of
from armature.components.planning.geometry import ModelGeometry, key_value_bytes, server_bytes, trainer_bytes
from armature.components.planning.gpus import GIB, Gpu
from armature.components.planning.simulate import Simulated, SimulatedRun
from armature.components.planning.workload import Workload
from armature.components.rl.settings import TrainVLMSettings

USABLE = 0.9
"""Of a GPU's memory; the rest is CUDA's context, NCCL and fragments."""
MAX_SEQUENCES = 256
"""vLLM's max_num_seqs."""


@dataclass(frozen=True)
class Layout:
    """`gpus_per_server`: tensor parallel; `slots`: sequences that a server decodes at once; bytes of one GPU."""

    servers: int
    gpus_per_server: int
    ranks: int
    slots: int
    server_bytes: int
    trainer_bytes: int


class Planner:
    """Plans a recipe's run on many GPUs.

    Args:
        given: values that stand in the places of computed costs, and where they are from.
    """

    def __init__(
        self,
        settings: TrainVLMSettings,
        machine: Machine,
        sizes: ModelGeometry,
        gpu: Gpu,
        workload: Workload,
        given: tuple[dict[str, object], str] = ({}, ""),
        steps: int = 2,
    ) -> None:
        self.settings, self.machine, self.sizes, self.gpu, self.workload = settings, machine, sizes, gpu, workload
        self._given, self._steps = given, steps
        self.gpus_per_server = self._server_size()
        self.fewest_ranks = self._fewest_ranks()

    def plan(self, gpus: int) -> tuple[Layout, SimulatedRun, Simulated]:
        """The better of two shares of `gpus`: the half for the trainer, and one after what both took of that.

        Raises:
            ConfigurationError: so few GPUs do not hold a server and the trainer.
        """
        if gpus < self.gpus_per_server + self.fewest_ranks:
            raise ConfigurationError(
                f"a server takes {self.gpus_per_server} GPUs of {self.gpu.name} and the trainer {self.fewest_ranks}",
                where=f"--gpus {gpus}",
                remedy="give more GPUs, or larger ones (--gpu)",
            )
        ranks = self._ranks(gpus, gpus / 2)
        half = self.run(self.layout(gpus, ranks))
        simulated = half.simulate()
        serving = simulated.server_share * half.servers * half.gpus_per_server
        training = simulated.trainer_share * half.ranks
        if self.settings.rollouts.max_staleness == 0:  # one waits for the other, so that time goes with the root
            serving, training = serving**0.5, training**0.5
        best = self._ranks(gpus, gpus * training / max(serving + training, 1e-12))
        if best == ranks:
            return self.layout(gpus, ranks), half, simulated
        other = self.run(self.layout(gpus, best))
        again = other.simulate()
        if again.step_seconds < simulated.step_seconds:
            return self.layout(gpus, best), other, again
        return self.layout(gpus, ranks), half, simulated

    def run(self, layout: Layout) -> SimulatedRun:
        """The recipe's run in `layout`, by computed costs and those that were given."""
        settings, rollouts = self.settings, self.settings.rollouts
        at_once = rollouts.groups_per_step * rollouts.group_size
        at_once *= 1 + rollouts.max_staleness * rollouts.in_flight_updates
        return SimulatedRun(
            rollouts=rollouts,
            batches=settings.batches,
            trainer=settings.trainer,
            costs=self.costs(layout),
            workload=self.workload,
            servers=layout.servers,
            ranks=layout.ranks,
            sharing=self.machine.trainer_context_parallel,
            max_concurrent=min(at_once, self._episodes_at_once(layout)),
            gpus_per_server=layout.gpus_per_server,
            train_tasks=settings.environment.train_tasks or 4096,
            steps=self._steps,
            resumes_alone=self.machine.sends_folders,
            waits_for_requests=self._adapters or self.machine.rollout_workers > 0,
        )

    def _episodes_at_once(self, layout: Layout) -> int:
        """Environments that need processes are as many as the recipe says; others as many as servers have room for."""
        if self.machine.environment_processes:
            return self.machine.max_concurrent
        return 4 * layout.servers * layout.slots

    @property
    def _adapters(self) -> bool:
        """Whether servers get the adapters alone."""
        lora = self.settings.model.lora
        return lora is not None and lora.served_as == "adapter"

    def costs(self, layout: Layout) -> Costs:
        costs = estimated(
            self.sizes,
            self.gpu,
            Assumptions(),
            servers=layout.servers,
            gpus_per_server=layout.gpus_per_server,
            ranks=layout.ranks,
            transfer="adapter" if self._adapters else self.machine.weight_transfer,
            mfu=mfu_of(self.settings.model, self.settings.trainer),
            slots=layout.slots,
        )
        return costs.replaced(*self._given)

    def layout(self, gpus: int, ranks: int) -> Layout:
        servers, context = (gpus - ranks) // self.gpus_per_server, self.settings.inference.max_model_len
        room = USABLE * self.gpu.memory * self.gpus_per_server - self.sizes.estimate.server_weights
        most = self.machine.server_arguments.get("max_num_seqs", MAX_SEQUENCES)
        slots = min(int(most), int(room / (key_value_bytes(self.sizes) * context)))
        return Layout(
            servers,
            self.gpus_per_server,
            ranks,
            slots,
            server_bytes(self.sizes, self.gpus_per_server, slots, context),
            trainer_bytes(self.sizes, self.settings.trainer, ranks, self.machine.trainer_context_parallel),
        )

    def _ranks(self, gpus: int, wished: float) -> int:
        """Whole nodes, where there are several; powers of 2 in one; multiples of the ranks that share sequences."""
        node = self.gpu.per_node
        most = gpus - self.gpus_per_server
        if gpus > node:
            ranks = round(wished / node) * node or node
            ranks = min(ranks, gpus - node)
        else:
            ranks = 2 ** max(0, int(wished).bit_length() - 1)
            while ranks > most:
                ranks //= 2
        return max(self.fewest_ranks, ranks - ranks % self.machine.trainer_context_parallel)

    def _server_size(self) -> int:
        """As the recipe says, else the fewest GPUs of a node with half of their memory left for sequences."""
        if named := max((len(each) for each in self.machine.server_gpus), default=0):
            sizes = [named * 2**power for power in range(4)]
        else:
            sizes = [1, 2, 4, 8]
        one = key_value_bytes(self.sizes) * self.settings.inference.max_model_len
        for count in sizes:
            room = USABLE * self.gpu.memory * count - self.sizes.estimate.server_weights
            if count <= self.gpu.per_node and room > one and self.sizes.estimate.server_weights < room:
                return count
        raise ConfigurationError(
            f"the weights of a server, {self.sizes.estimate.server_weights / GIB:.0f} GiB, and one sequence of "
            f"{self.settings.inference.max_model_len} tokens leave too little room on {self.gpu.per_node} GPUs",
            where=f"--gpu {self.gpu.name}",
            remedy="take larger GPUs, a smaller model, or a smaller inference.max_model_len",
        )

    def _fewest_ranks(self) -> int:
        trainer, sharing = self.settings.trainer, self.machine.trainer_context_parallel
        for ranks in (1, 2, 4, *range(8, 8193, 8)):
            fits = trainer_bytes(self.sizes, trainer, ranks, sharing) <= USABLE * self.gpu.memory
            if fits and ranks % sharing == 0:
                return ranks
        least = trainer_bytes(self.sizes, trainer, 8192, sharing)
        raise ConfigurationError(
            f"a rank of the trainer needs {least / GIB:.0f} GiB, however many there are, of "
            f"{self.gpu.memory / GIB:.0f}: a gathered block and the activations of a micro-batch are not split",
            where=f"--gpu {self.gpu.name}, trainer.max_tokens_per_micro_batch = {trainer.max_tokens_per_micro_batch}",
            remedy="lower trainer.max_tokens_per_micro_batch, set model.gradient_checkpointing = true, raise "
            "machine.trainer_context_parallel, or take larger GPUs",
        )
