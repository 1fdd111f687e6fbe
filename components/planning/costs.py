"""What everything costs: measured in a run, given in a file, or computed from a GPU's data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings


class ServerCosts(Settings):
    """A forward pass takes `pass_seconds`, and more for its tokens and for what they attend to."""

    pass_seconds: NonNegativeFloat = Field(description="Seconds of a forward pass, however few tokens it has.")
    token_seconds: NonNegativeFloat = Field(description="More for each token in it, of a prompt or decoded.")
    context_token_seconds: NonNegativeFloat = Field(
        0.0, description="More for each token of context that a decoded token attends to."
    )
    slots: PositiveInt = Field(256, description="Sequences that a server decodes at once.")


class TrainerCosts(Settings):
    """A round, in which each rank has a micro-batch, takes `micro_batch_seconds`, as long as its tokens or as gathering
    the weights beside them, and `exposed_seconds`."""

    token_seconds: NonNegativeFloat = Field(description="Seconds of a rank for a token, forward and backward.")
    micro_batch_seconds: NonNegativeFloat = Field(
        0.0, description="Seconds of a micro-batch, however few tokens it has: the host, and small kernels."
    )
    gather_seconds: NonNegativeFloat = Field(
        0.0, description="Seconds to gather the weights and scatter the gradients of a micro-batch between the ranks."
    )
    exposed_seconds: NonNegativeFloat = Field(
        0.0, description="Seconds of a micro-batch that ranks wait for collectives and each other, hidden by nothing."
    )
    update_seconds: NonNegativeFloat = Field(0.0, description="Seconds of the optimizer, and other seconds of a step.")
    checkpoint_seconds: NonNegativeFloat = Field(0.0, description="Seconds that a step waits for a checkpoint.")


class FlowCosts(Settings):
    """The one process that plays the episodes and sends the requests does one thing at a time."""

    request_seconds: NonNegativeFloat = Field(description="Seconds of its event loop for a turn.")
    image_seconds: NonNegativeFloat = Field(0.0, description="More for each image of the conversation.")
    rollout_seconds: NonNegativeFloat = Field(0.0, description="Seconds for a rollout in the batch of a step.")
    batch_seconds: NonNegativeFloat = Field(0.0, description="Seconds of a batch, however few rollouts it has.")
    step_seconds: NonNegativeFloat = Field(0.0, description="Seconds of a step's rollouts, however few there are.")


class FailureCosts(Settings):
    """How often a GPU, with the host around it, fails, and how long it is until its work goes on."""

    hours_between: PositiveFloat | None = Field(None, description="Mean hours between failures of a GPU; none: never.")
    server_restart_seconds: NonNegativeFloat = Field(120.0, description="Seconds until a server answers again.")
    trainer_restart_seconds: NonNegativeFloat = Field(
        300.0, description="Seconds until the trainer has its newest checkpoint; the steps since then come on top."
    )


class CostTables(Settings):
    """Costs by name, some in tables. `sources` says of each where it is from."""

    sources: Mapping[str, str] = Field({}, description="Where each is from, by its dotted name.")

    def replaced(self, values: Mapping[str, Any], source: str) -> Self:
        """With `values`, tables of the same shape, in their places.

        Raises:
            ValidationError: an unknown key, or a value out of bounds.
        """
        tables = self.model_dump()
        names: list[str] = []
        for name, value in values.items():
            if isinstance(value, Mapping) and isinstance(tables.get(name), dict):
                tables[name] |= value
                names += [f"{name}.{key}" for key in value]
            else:
                tables[name] = value
                names.append(name)
        tables["sources"] = {**self.sources, **dict.fromkeys(names, source)}
        return self.model_validate(tables)

    def lines(self) -> list[str]:
        """A line for each cost whose source is known: its name, its value, where it is from."""
        values = {
            f"{name}.{key}" if isinstance(table, dict) else name: value
            for name, table in self.model_dump(exclude={"sources"}).items()
            for key, value in (table.items() if isinstance(table, dict) else [("", table)])
        }
        return [f"{name:<32} {_said(values[name]):>10}  {source}" for name, source in sorted(self.sources.items())]


class Costs(CostTables):
    """Seconds of everything that the loop waits for."""

    servers: ServerCosts
    trainer: TrainerCosts
    flow: FlowCosts
    publish_seconds: NonNegativeFloat = Field(0.0, description="Seconds to publish weights, while servers go on.")
    sync_seconds: NonNegativeFloat = Field(description="Seconds to load them, while no answer goes on.")
    failures: FailureCosts = Field(FailureCosts(), description="Failures and recovery.")

    @classmethod
    def nothing(cls) -> Costs:
        """Nothing takes any time."""
        return cls(
            servers=ServerCosts(pass_seconds=0.0, token_seconds=0.0),
            trainer=TrainerCosts(token_seconds=0.0),
            flow=FlowCosts(request_seconds=0.0),
            sync_seconds=0.0,
        )


def _said(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
