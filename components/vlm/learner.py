"""One training step: micro-batches in, an updated policy and its metrics out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from torch import Tensor, nn

from armature.components.contracts.batches import MultimodalBatch, Sample
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.metrics import merged
from armature.components.families.family import family_of
from armature.components.models.adapters.family import model_inputs
from armature.components.models.compiled import compile_layers, pad_widths
from armature.components.models.context_parallel import to_device
from armature.components.models.lora import base_model
from armature.components.models.packed import complete_packing
from armature.components.rollouts.batches.table import check_samples
from armature.components.training.engine import ALL, ParameterGroup, TrainingEngine, peak_memory_gib
from armature.components.training.ranks import Ranks
from armature.components.training.schedule import learning_rate
from armature.components.vlm.logprobs import Policy, check_head, predicting
from armature.components.vlm.memory import offloaded_activations
from armature.components.vlm.metrics import Meter, batch_report
from armature.components.vlm.objectives import Tokens, loss_of, normalizer
from armature.components.vlm.packing import MicroBatch, PackedBatch, micro_batches, packed_micro_batches, share, updates
from armature.components.vlm.settings import TrainerSettings

# In which data type a model's weights are trained.


def prepare_weights(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """`model`, of which what is trained is in fp32, or in bf16.

    An update of 1e-6 is lost in the 8 bits of a bf16 weight: of those the optimizer keeps the masters.

    Raises:
        ConfigurationError: weights of several dtypes without autocast, or loaded in another dtype than is asked for.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.weights == "bfloat16":
        adapters = trained if isinstance(model, PeftModel) else []  # PEFT makes them in fp32
        _set_dtype(adapters, torch.bfloat16)
        if (dtypes := _dtypes(model)) != {torch.bfloat16}:
            raise ConfigurationError(
                f"weights that compute in bfloat16 are to be loaded in it, and there are {_named(dtypes)}",
                code="weights_dtype_mismatch",
                where="trainer.weights",
                remedy="set model.dtype = 'bfloat16', or leave trainer.weights out",
            )
        return model
    _set_dtype(trained, torch.float32)
    if len(dtypes := _dtypes(model)) > 1 and settings.autocast == "none":
        raise ConfigurationError(
            f"weights of several types ({_named(dtypes)}) need autocast",
            code="autocast_missing",
            where="trainer.autocast",
            remedy="set trainer.autocast = 'bf16', or model.dtype = 'float32'",
        )
    return model


def _set_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes)))


Load = Callable[[Sequence[MicroBatch]], Iterator[tuple[MicroBatch, MultimodalBatch]]]
"""Gives each planned micro-batch its tensors, in order."""


class Learner(TrainingEngine[Any]):
    """The policy, its optimizer, and how a batch changes them.

    `log_ratios` are of the last step; see `Meter.report`.

    Args:
        model: a vision-language model, with or without adapters; what requires a gradient is trained, in fp32.
        settings: the objective and the optimizer.
        temperature: of the sampler.
        forbidden_token_ids: tokens that the sampler could not choose.
        ranks: the processes that train together.
        shard: splits a model without weights over the ranks (FSDP2) and gives each rank its shards, where every
            rank would else hold all of it; called with the policy, and with the reference where there is one.

    Raises:
        ConfigurationError: weights of several dtypes without autocast, an output head that is not understood, or ranks
            that share sequences which are not packed.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainerSettings,
        *,
        temperature: float,
        forbidden_token_ids: Sequence[int] = (),
        ranks: Ranks | None = None,
        shard: Callable[[Policy], None] | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings = settings
        if ranks.context is not None and not settings.packing:
            raise ConfigurationError(
                "ranks share packed sequences alone",
                code="sharing_needs_packing",
                where="trainer.packing, machine.trainer_context_parallel",
                remedy="set trainer.packing = true",
            )
        if shard is None:
            model.to(ranks.device)
        self._make_policy = lambda inner: Policy(
            inner,
            logprobs=settings.logprobs.name,
            **settings.logprobs.model_dump(exclude={"name"}),
            temperature=temperature,
            forbidden_token_ids=forbidden_token_ids,
            autocast=torch.bfloat16 if settings.autocast == "bf16" else None,
            device=ranks.device,
            packing=settings.packing,
            context=ranks.context,
        )
        needs_copy = settings.kl_coefficient > 0 and not isinstance(model, PeftModel)
        self.reference = self._make_policy(deepcopy(model).requires_grad_(False)) if needs_copy else None
        self.policy = self._make_policy(prepare_weights(model, settings))
        for policy in (self.policy, self.reference):
            if policy is not None:
                (shard or partial(Policy.to, device=ranks.device))(policy)
        check_head(self.policy)
        in_bf16 = settings.weights == "bfloat16" or settings.autocast == "bf16"
        for policy in filter(None, (self.policy, self.reference)):
            if in_bf16 and ranks.device.type == "cuda":
                pad_widths(policy)
            if settings.torch_compile:
                compile_layers(base_model(policy.model))
        self.log_ratios: dict[int, npt.NDArray[np.float32]] = {}
        super().__init__(
            self.policy.model,
            _parameter_groups(self.policy.model, settings),
            ranks,
            sharded=shard is not None,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            max_grad_norm=settings.max_grad_norm,
            masters=settings.weights == "bfloat16",
            states=settings.optimizer_states,
        )

    def step(self, samples: Sequence[Sample], load: Load) -> dict[str, float]:
        """Train on one batch: one update, or one per `samples_per_update` samples. Every rank calls it alike.

        A batch without samples (every group agreed on its reward) is a step without an update, and so is one without
        a trained token: weights and the optimizer's moments stay, the step counts in the schedule.

        Returns:
            The metrics of the step, over all ranks; see `armature.components.vlm.metrics`.

        Raises:
            DataError: samples that cannot be trained on; see `check_samples`.
            DivergedError: too many updates in a row had a gradient that is not finite.
        """
        check_samples(samples)
        began, meter = perf_counter(), Meter()
        all_rows = list(updates(len(samples), self.settings.samples_per_update))
        start = None
        if self.settings.correction.mode != "none" and len(all_rows) > 1:
            start = self._score(samples, load)
        for rows in all_rows:
            n_tokens = sum(int(samples[row].loss_mask[1:].sum()) for row in rows)
            n_sequences = sum(bool(samples[row].loss_mask[1:].any()) for row in rows)
            plan = self.plan(samples, rows)
            self._update(load(plan), len(plan), n_tokens, n_sequences, meter, start)
        return self._finish(meter, batch_report(samples), began)

    def score(self, samples: Sequence[Sample], load: Load) -> list[npt.NDArray[np.float32]]:
        """For each sample (L,) log-probs of its trained tokens, 0 elsewhere. Every rank calls it alike."""
        scored = self._score(samples, load)
        arrays = []
        for row, sample in enumerate(samples):
            array = np.zeros(len(sample.input_ids), dtype=np.float32)
            array[1:][sample.loss_mask[1:]] = scored[row].numpy()
            arrays.append(array)
        return arrays

    def plan(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[MicroBatch]:
        """The micro-batches of this rank, for an update on `rows` of `samples`."""
        settings, (part, parts) = self.settings, self.ranks.data_parallel
        most = settings.max_tokens_per_micro_batch, settings.max_rows_per_micro_batch
        if settings.packing:
            config = base_model(self.model).config
            image_token = getattr(config, family_of(config).placeholder)
            planned = packed_micro_batches(samples, rows, *most, image_token, parts)
        else:
            planned = micro_batches(samples, rows, *most, parts)
        return share(planned, part, parts)

    def _update(
        self,
        batches: Iterable[tuple[MicroBatch, MultimodalBatch]],
        n_batches: int,
        n_tokens: int,
        n_sequences: int,
        meter: Meter,
        start: dict[int, Tensor] | None,
    ) -> None:
        """Accumulate the gradient of all micro-batches, normalized by the counts of all ranks, and apply it."""
        if n_tokens == 0:
            return
        scale = 1 / normalizer(self.settings, n_tokens, n_sequences)
        for number, (micro, batch) in enumerate(batches, 1):
            batch = self._ready(batch)
            at = predicting(batch.loss_mask, self.ranks.device)
            with offloaded_activations() if self.settings.activation_offloading else nullcontext():
                logprobs, entropy = _run(self.policy, batch, at)
            given = self._given(batch, at[0])
            at_start = _at_start(micro, logprobs, start)
            corrected = self.settings.correction.mode != "none"
            tokens = Tokens(logprobs, at_start if corrected else given["behavior"], **given)
            loss = loss_of(tokens, entropy, self._reference_logprobs(batch, at), at_start, self.settings)
            self.backward(loss.total * scale, last=number == n_batches)
            if self.settings.activation_offloading and self.ranks.device.type == "cuda":
                torch.cuda.current_stream(self.ranks.device).synchronize()  # or copies of two would be kept at once
            meter.add(micro, tokens, loss, scale)
            if isinstance(batch, PackedBatch):
                meter.add_packed(len(batch.packing.rows))
        done = self.update(self.steps_done + 1)
        meter.update(done.norms[ALL], done.finite)

    def _finish(self, meter: Meter, batch: dict[str, float], began: float) -> dict[str, float]:
        report, self.log_ratios = meter.report(self.ranks, peak_memory_gib(self.ranks.device))
        self.steps_done += 1
        seconds = perf_counter() - began
        position = {
            "learning_rate": _learning_rates(self.settings)(self.steps_done),
            "timing/train_s": seconds,
            "tokens_per_second": batch.get("tokens/total", batch["tokens/trained"]) / seconds,
        }
        return merged(meter=report, batch=batch, step=position)

    @torch.no_grad()
    def _score(self, samples: Sequence[Sample], load: Load) -> dict[int, Tensor]:
        """Log-probs (T,) of the T trained tokens of each sample, by its position, on the CPU. An update may give its
        ranks other samples than this does.
        """
        scored: dict[int, Tensor] = {}
        for micro, batch in load(self.plan(samples, range(len(samples)))):
            batch = self._ready(batch)
            logprobs, _ = _run(self.policy, batch, predicting(batch.loss_mask, self.ranks.device))
            lengths = batch.loss_mask[:, 1:].sum(1).tolist()
            parts = logprobs.cpu().split(lengths)
            scored |= {row: part for row, part in zip(micro.rows, parts, strict=True) if row >= 0}
        return {row: values for part in self.ranks.gather(scored) for row, values in part.items()}

    @torch.no_grad()
    def _reference_logprobs(self, batch: MultimodalBatch, at: tuple[Tensor, Tensor]) -> Tensor | None:
        """(N,) log-probs under the initial model: its frozen copy, or the policy without its adapters."""
        if self.settings.kl_coefficient == 0:
            return None
        without: AbstractContextManager[Any] = nullcontext()
        if self.reference is None:
            without = self.model.disable_adapter()
        logprobs: Tensor
        with without:
            policy = self.policy if self.reference is None else self.reference
            logprobs, _ = _run(policy, batch, at)
        return logprobs

    def _ready(self, batch: MultimodalBatch) -> MultimodalBatch:
        """The batch, with what the model takes on the device of this rank; positions of packed rows are made before.

        What says which tokens are trained, and how, stays on the CPU: to ask a GPU is to wait for what it does.
        """
        if isinstance(batch, PackedBatch):
            model, context = base_model(self.model), self.ranks.context
            packing = complete_packing(model, model_inputs(batch), batch.grids, batch.packing, context)
            batch = replace(batch, packing=packing.to(self.ranks.device))
        move = partial(to_device, device=self.ranks.device)
        return replace(
            batch,
            input_ids=move(batch.input_ids),
            attention_mask=move(batch.attention_mask),
            pixel_values=None if batch.pixel_values is None else move(batch.pixel_values),
            extra_model_kwargs={name: move(value) for name, value in batch.extra_model_kwargs.items()},
        )

    def _given(self, batch: MultimodalBatch, rows: Tensor) -> dict[str, Any]:
        """What `Tokens` has from the batch, of which `rows` are those of the trained tokens."""
        assert batch.advantages is not None
        trained = batch.loss_mask[:, 1:]
        behavior, advantages = (
            to_device(values[:, 1:][trained].float(), self.ranks.device)
            for values in (batch.behavior_logprobs, batch.advantages)
        )
        return {"behavior": behavior, "advantages": advantages, "rows": rows, "n_rows": len(trained)}


def _run(policy: Policy, batch: MultimodalBatch, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    packing = batch.packing if isinstance(batch, PackedBatch) else None
    logprobs, entropy = policy(model_inputs(batch), at, packing)
    return logprobs, entropy


def _at_start(micro: MicroBatch, logprobs: Tensor, start: dict[int, Tensor] | None) -> Tensor:
    """Log-probs of the policy at the start of the step: those at hand, before the first update."""
    if start is None:
        return logprobs.detach()
    found = [start[row] for row in micro.rows if row >= 0]
    return torch.cat(found).to(logprobs.device) if found else logprobs.detach()


def _learning_rates(settings: TrainerSettings) -> Callable[[float], float]:
    return partial(
        learning_rate,
        peak=settings.learning_rate,
        warmup=settings.warmup_steps,
        steps=settings.max_steps,
        scheduler=settings.lr_scheduler,
    )


def _parameter_groups(model: nn.Module, settings: TrainerSettings) -> list[ParameterGroup]:
    """Matrices and vectors; vectors (norms and biases) are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = _learning_rates(settings)
    return [
        ParameterGroup("matrices", [p for p in trained if p.ndim >= 2], rate, settings.weight_decay),
        ParameterGroup("vectors", [p for p in trained if p.ndim < 2], rate, 0.0),
    ]
