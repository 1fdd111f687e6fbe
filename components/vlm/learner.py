"""A training step of a vision-language model: a batch of samples in, updated weights and metrics out.

`Learner.step` and `Learner._accumulate` read from top to bottom. Three things happen elsewhere: `packing` decides which
samples share a forward pass, `objectives` computes the loss, and the base class `TrainingEngine`, shared with robot
policies, owns gradients and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from torch import Tensor, nn

from armature.components.contracts.batches import MultimodalBatch, Sample, TeacherScores
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.metrics import merged
from armature.components.families.family import family_of
from armature.components.models.adapters.family import model_inputs
from armature.components.models.compiled import compile_layers, pad_widths
from armature.components.models.context_parallel import to_device
from armature.components.models.load import kept_in_fp32
from armature.components.models.lora import base_model
from armature.components.models.packed import complete_packing
from armature.components.rollouts.batches.table import check_samples
from armature.components.training.engine import ALL, ParameterGroup, TrainingEngine, peak_memory_gib
from armature.components.training.ranks import Ranks
from armature.components.training.schedule import learning_rate
from armature.components.vlm.client import OUT_OF_MEMORY
from armature.components.vlm.distillation import divergence
from armature.components.vlm.logprobs import Policy, check_head, predicting
from armature.components.vlm.memory import offloaded_activations
from armature.components.vlm.metrics import Meter, batch_report
from armature.components.vlm.objectives import Tokens, loss_of, normalizer, together
from armature.components.vlm.packing import MicroBatch, PackedBatch, micro_batches, packed_micro_batches, share, updates
from armature.components.vlm.settings import SampledReverseKL, TeacherSettings, TrainerSettings

Load = Callable[[Sequence[MicroBatch]], Iterator[tuple[MicroBatch, MultimodalBatch]]]
"""A function that takes planned micro-batches, and yields each of them with its tensors in the order of the plan."""


def prepare_weights(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """Cast the trained weights of `model` to the dtype that `settings.weights` names, in place, and return `model`.

    The default is fp32, because an update of 1e-6 is lost in the 8 bits of a bf16 weight. With bf16 weights the
    optimizer keeps fp32 masters instead.

    Raises:
        ConfigurationError: the weights have several dtypes and autocast is off, or `settings.weights` is bfloat16 and
            the model was loaded in another dtype. Weights that transformers keeps in fp32 do not count then.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.weights == "bfloat16":
        adapters = trained if isinstance(model, PeftModel) else []  # PEFT makes them in fp32
        _set_dtype(adapters, torch.bfloat16)
        in_fp32 = {id(tensor) for tensor in kept_in_fp32(base_model(model))}
        if (dtypes := _dtypes(p for p in model.parameters() if id(p) not in in_fp32)) != {torch.bfloat16}:
            raise ConfigurationError(
                f"trainer.weights is bfloat16, but the model was loaded in {_names(dtypes)}",
                code="weights_dtype_mismatch",
                where="trainer.weights",
                remedy="set model.dtype = 'bfloat16', or leave trainer.weights out",
            )
        return model
    _set_dtype(trained, torch.float32)
    if len(dtypes := _dtypes(model.parameters())) > 1 and settings.autocast == "none":
        raise ConfigurationError(
            f"the weights have several dtypes ({_names(dtypes)}), which needs autocast",
            code="autocast_missing",
            where="trainer.autocast",
            remedy="set trainer.autocast = 'bf16', or model.dtype = 'float32'",
        )
    return model


def _set_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _dtypes(parameters: Iterable[nn.Parameter]) -> set[torch.dtype]:
    return {parameter.dtype for parameter in parameters if parameter.is_floating_point()}


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes)))


@dataclass(frozen=True)
class Teacher:
    """Models that score samples, by the kind of task. With each is the function that shards it, if the learner's model
    is sharded."""

    settings: TeacherSettings
    models: dict[str, tuple[Any, Callable[[Policy], None] | None]]


class Learner(TrainingEngine[Any]):
    """Trains a vision-language model, one batch of samples per step.

    After a step, `log_ratios` has the log-ratios of its tokens to the sampler; see `Meter.report`.

    Args:
        model: a vision-language model, with or without adapters. The parameters that require a gradient are trained,
            in fp32 unless `settings.weights` says otherwise.
        settings: the objective and the optimizer.
        temperature: the temperature that the sampler divided its logits by.
        forbidden_token_ids: tokens that the sampler could not choose.
        ranks: the processes that train together; by default this one alone.
        shard: splits a model without weights over the ranks (FSDP2) and loads each rank's shards, so that no rank has
            to hold the whole model. It is called with the policy, and with the reference model if there is one.
        teacher: a teacher, whose scores the samples of steps have; see `teach`.
        may_recompute: if the memory is not enough for a step, recompute activations in it and in all later ones.

    Raises:
        ConfigurationError: the weights have several dtypes and autocast is off, the output head is not supported, or
            ranks share sequences (context parallelism) without packing, or a load-balance loss without trained routers.
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
        teacher: Teacher | None = None,
        may_recompute: bool = False,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings = settings
        # If one of several ranks runs out of memory, the others wait for it in a collective. An interrupted pass of a
        # sharded model leaves gathered weights.
        self._may_recompute = may_recompute and ranks.size == 1 and shard is None
        if ranks.context is not None and not settings.packing:
            raise ConfigurationError(
                "context parallelism works on packed sequences only",
                code="sharing_needs_packing",
                where="trainer.packing, machine.trainer.context_parallel",
                remedy="set trainer.packing = true",
            )
        if shard is None:
            model.to(ranks.device)
        make_policy = partial(
            Policy,
            logprobs=settings.logprobs.name,
            **settings.logprobs.model_dump(exclude={"name"}),
            temperature=temperature,
            forbidden_token_ids=forbidden_token_ids,
            autocast=torch.bfloat16 if settings.autocast == "bf16" else None,
            device=ranks.device,
            packing=settings.packing,
            context=ranks.context,
        )
        # The KL term needs the initial model. A model with adapters has it: switch them off. Any other is copied.
        needs_copy = settings.kl_coefficient > 0 and not isinstance(model, PeftModel)
        self.reference = make_policy(model=deepcopy(model).requires_grad_(False)) if needs_copy else None
        self.policy = make_policy(model=prepare_weights(model, settings))
        policies = [policy for policy in (self.policy, self.reference) if policy is not None]
        for policy in policies:
            (shard or partial(Policy.to, device=ranks.device))(policy)
        check_head(self.policy)
        self.teacher = teacher
        self.teacher_policies: dict[str, Policy] = {}
        for kind, (scoring, shards) in teacher.models.items() if teacher is not None else ():
            # Its head may have more rows, for ids that no token has. The policy cannot choose them.
            rows = len(scoring.get_output_embeddings().weight)
            forbidden = (*forbidden_token_ids, *range(len(self.policy.forbidden), rows))
            scorer = make_policy(model=scoring.requires_grad_(False), forbidden_token_ids=forbidden)
            (shards or partial(Policy.to, device=ranks.device))(scorer)
            check_head(scorer)
            self.teacher_policies[kind] = scorer
        self.policy.routers.collects = settings.load_balance_coefficient > 0
        if settings.load_balance_coefficient > 0 and not any(
            parameter.requires_grad for each in self.policy.routers.routers.values() for parameter in each.parameters()
        ):
            raise ConfigurationError(
                "the load of experts cannot be balanced, because no router is trained",
                code="routers_frozen",
                where="trainer.load_balance_coefficient",
                remedy="set model.train_routers = true for a mixture of experts, or leave it out",
            )
        in_bf16 = settings.weights == "bfloat16" or settings.autocast == "bf16"
        for policy in policies:
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
        """Train on one batch: one optimizer update, or one per `samples_per_update` samples.

        Every rank calls it with the same samples. A batch without a trained token, or without samples because every
        group agreed on its reward, changes neither weights nor moments; its step still counts in the schedule.

        Returns:
            The metrics of the step, over all ranks; see `armature.components.vlm.metrics`.

        Raises:
            DataError: samples that cannot be trained on; see `check_samples`.
            DivergedError: the gradients of too many updates in a row were not finite.
            torch.OutOfMemoryError: the memory is not enough, with recomputed activations either if they are allowed.
        """
        check_samples(samples)
        settings, began, meter, exceeded = self.settings, perf_counter(), Meter(), dict[str, float]()
        self.policy.routers.take_counts()  # forget the counts of scoring
        rows_of_updates = list(updates(len(samples), settings.samples_per_update))

        # The importance correction refers to the policy at the start of the step. In the first update these are the
        # log-probs of its own forward pass; for later updates compute them now, before the weights change.
        corrects = settings.correction.mode != "none"
        start = self._score(samples, load) if corrects and len(rows_of_updates) > 1 else None

        for rows in rows_of_updates:
            # Count over the samples of all ranks: divided by the same number, the gradients of all micro-batches and
            # ranks add up to the gradient of one large batch, however the samples are spread.
            n_tokens = sum(int(samples[row].loss_mask[1:].sum()) for row in rows)
            n_sequences = sum(bool(samples[row].loss_mask[1:].any()) for row in rows)
            if n_tokens == 0:
                continue
            scale = 1 / normalizer(settings, n_tokens, n_sequences)
            plan = self.plan(samples, rows)
            while True:
                try:
                    self._accumulate(plan, load, start, n_tokens, scale, meter)
                    break
                except torch.OutOfMemoryError:
                    if not self._may_recompute or self.policy.recomputes:
                        raise
                # Out here the error is gone, which held activations.
                self._fall_back(meter)
                exceeded = {OUT_OF_MEMORY: 1.0}

            # 4. Sum the gradients over the ranks, clip them, and make the AdamW step if their norm is finite.
            applied = self.update(self.steps_done + 1)
            meter.update(applied.norms[ALL], applied.finite)
        meter.experts = self.policy.routers.take_counts()

        report, self.log_ratios = meter.report(self.ranks, peak_memory_gib(self.ranks.device))
        self.steps_done += 1
        batch_metrics, seconds = batch_report(samples), perf_counter() - began
        position = {
            "learning_rate": _learning_rates(settings)(self.steps_done),
            "timing/train_s": seconds,
            "tokens_per_second": batch_metrics["tokens/total"] / seconds,
        }
        return merged(meter=report, batch=batch_metrics, step=position, memory=exceeded)

    def _accumulate(
        self,
        plan: Sequence[MicroBatch],
        load: Load,
        start: dict[int, Tensor] | None,
        n_tokens: int,
        scale: float,
        meter: Meter,
    ) -> None:
        """Add up the gradients of an update, whose micro-batches are `plan`."""
        settings, device, corrects = self.settings, self.ranks.device, self.settings.correction.mode != "none"
        for number, (micro, batch) in enumerate(load(plan), 1):
            batch = self._to_device(batch)
            at = predicting(batch.loss_mask, device)
            ids, taught = self._likeliest(micro)

            # 1. Forward pass: log-probs and entropies (N,) of the N trained tokens, and of no others.
            with offloaded_activations() if settings.activation_offloading else nullcontext():
                logprobs, entropy, *candidates = _forward(self.policy, batch, at, candidates=ids)
            balance = self.policy.routers.balance_loss() if settings.load_balance_coefficient > 0 else None
            behavior, advantages = _of_trained_tokens(batch, device)
            at_start = logprobs.detach()
            if start is not None and (parts := [start[row] for row in micro.rows if row >= 0]):
                at_start = torch.cat(parts).to(device)

            # 2. Loss: the objective's ratio is against the sampler, or with a correction against the policy at the
            # start of the step, and the correction weighs the difference between the two.
            denominator = at_start if corrects else behavior
            tokens = Tokens(logprobs, denominator, behavior, advantages, rows=at[0], n_rows=len(batch.loss_mask))
            reference = self._reference_logprobs(batch, at) if settings.kl_coefficient > 0 else None
            distance = None
            if taught is not None and self.teacher and not isinstance(self.teacher.settings.loss, SampledReverseKL):
                away = divergence(candidates[0], taught, self.teacher.settings.loss)
                distance = self.teacher.settings.weight * away.to(logprobs.dtype)
            loss = loss_of(tokens, entropy, reference, at_start, settings, distance)
            total = loss.total * scale
            if balance is not None:  # micro-batches and ranks weigh as much as they have trained tokens
                share = len(logprobs) / n_tokens / self.ranks.part[1]
                total = total + settings.load_balance_coefficient * share * balance

            # 3. Backward pass. `last` lets the sums over ranks begin while the pass is still running.
            self.backward(total, last=number == len(plan))
            if settings.activation_offloading and device.type == "cuda":
                # Otherwise offloaded copies of two micro-batches would be in main memory at once.
                torch.cuda.current_stream(device).synchronize()
            meter.add(micro, tokens, loss, scale, len(batch.packing.rows) if isinstance(batch, PackedBatch) else 0)

    def _fall_back(self, meter: Meter) -> None:
        """Recompute activations from now on, and forget what was computed since the last update."""
        self.discard()
        meter.discard()
        self.policy.routers.take_counts()
        self.policy.recompute_activations()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def score(self, samples: Sequence[Sample], load: Load) -> list[npt.NDArray[np.float32]]:
        """Return for each sample the log-probs (L,) of its trained tokens, 0 elsewhere. Every rank calls it."""
        scored = self._score(samples, load)
        arrays = []
        for row, sample in enumerate(samples):
            array = np.zeros(len(sample.input_ids), dtype=np.float32)
            array[1:][sample.loss_mask[1:]] = scored[row].numpy()
            arrays.append(array)
        return arrays

    def teach(self, samples: Sequence[Sample], load: Load, kind: str = "") -> list[Sample]:
        """Return the samples with the scores of the teacher of this kind of task, which there must be. Every rank calls
        it."""
        assert self.teacher is not None
        k = self.teacher.settings.likeliest
        plain = [replace(sample, experts=None) for sample in samples]  # a server's experts are the policy's
        scored = self._forward_all(self.teacher_policies[kind], plain, load, likeliest=k)
        taught = []
        for row, sample in enumerate(samples):
            logprobs, _, *tops = (values.numpy() for values in scored[row])
            ids, likeliest = tops or np.zeros((2, len(logprobs), 0))
            scores = TeacherScores(logprobs, ids.astype(np.int32), likeliest.astype(np.float32))
            taught.append(replace(sample, teacher=scores))
        return taught

    def evaluate(self, samples: Sequence[Sample], load: Load) -> dict[str, float]:
        """Return the mean loss of the trained tokens, -log p in nats, and the share that greedy decoding would choose.

        Every rank calls it.
        """
        scored = self._forward_all(self.policy, samples, load, likeliest=1)
        logprobs = torch.cat([scored[row][0] for row in range(len(samples))]).double()
        likeliest = torch.cat([scored[row][2][:, 0] for row in range(len(samples))]).numpy()
        tokens = np.concatenate([sample.input_ids[1:][sample.loss_mask[1:]] for sample in samples])
        return {"loss": -logprobs.mean().item(), "token_accuracy": float((likeliest == tokens).mean())}

    def plan(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[MicroBatch]:
        """Return the micro-batches of this rank for an update on `rows` of `samples`."""
        settings, (part, parts) = self.settings, self.ranks.data_parallel
        most = settings.max_tokens_per_micro_batch, settings.max_rows_per_micro_batch
        if settings.packing:
            config = base_model(self.model).config
            image_token = getattr(config, family_of(config).placeholder)
            planned = packed_micro_batches(samples, rows, *most, image_token, parts, together(settings))
        else:
            planned = micro_batches(samples, rows, *most, parts, together(settings))
        return share(planned, part, parts)

    def _score(self, samples: Sequence[Sample], load: Load) -> dict[int, Tensor]:
        """Return the log-probs (T,) of the T trained tokens of each sample, by position in the batch, on the CPU."""
        return {row: values[0] for row, values in self._forward_all(self.policy, samples, load).items()}

    @torch.no_grad()
    def _forward_all(
        self, policy: Policy, samples: Sequence[Sample], load: Load, **options: Any
    ) -> dict[int, list[Tensor]]:
        """Return what `policy` gives for the T trained tokens of each sample, (T,) or (T, k), by its position in the
        batch, on the CPU.

        Every rank gets the results of all samples, because in an update it may train on samples it has not scored.
        """
        scored: dict[int, list[Tensor]] = {}
        for micro, batch in load(self.plan(samples, range(len(samples)))):
            batch = self._to_device(batch, policy)
            results = _forward(policy, batch, predicting(batch.loss_mask, self.ranks.device), **options)
            lengths = batch.loss_mask[:, 1:].sum(1).tolist()
            parts = zip(*(result.cpu().split(lengths) for result in results), strict=True)
            scored |= {row: list(part) for row, part in zip(micro.rows, parts, strict=True) if row >= 0}
        return {row: values for part in self.ranks.gather(scored) for row, values in part.items()}

    def _likeliest(self, micro: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """Return the ids (N, k) of the teacher's likeliest tokens at the trained tokens, and their log-probs; None
        unless the loss needs them."""
        if self.teacher is None or not self.teacher.settings.likeliest:
            return None, None
        scored = [(each.teacher, int(each.loss_mask.sum())) for each in micro.samples]  # a dummy has 0 trained tokens
        columns = [(scores.ids[:count], scores.likeliest[:count]) for scores, count in scored if scores is not None]
        ids, likeliest = (torch.from_numpy(np.concatenate(each)) for each in zip(*columns, strict=True))
        return to_device(ids.long(), self.ranks.device), to_device(likeliest, self.ranks.device)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MultimodalBatch, at: tuple[Tensor, Tensor]) -> Tensor:
        """Return the log-probs (N,) of the trained tokens under the initial model.

        The initial model is a frozen copy, or the policy without its adapters.
        """
        if self.reference is not None:
            return _forward(self.reference, batch, at)[0]
        with self.model.disable_adapter():
            return _forward(self.policy, batch, at)[0]

    def _to_device(self, batch: MultimodalBatch, policy: Policy | None = None) -> MultimodalBatch:
        """Compute the positions of packed rows, and move the model's inputs to the device of this rank.

        The loss mask, advantages and log-probs stay on the CPU: indexing by a mask on a GPU would wait for the GPU.
        """
        if isinstance(batch, PackedBatch):
            model, context = base_model(policy.model if policy else self.model), self.ranks.context
            packing = complete_packing(model, model_inputs(batch), batch.grids, batch.packing, context)
            batch = replace(batch, packing=packing.to(self.ranks.device))
        move = partial(to_device, device=self.ranks.device)
        return replace(
            batch,
            input_ids=move(batch.input_ids),
            attention_mask=move(batch.attention_mask),
            pixel_values=None if batch.pixel_values is None else move(batch.pixel_values),
            extra_model_kwargs={name: move(value) for name, value in batch.extra_model_kwargs.items()},
            experts=None if batch.experts is None else move(batch.experts),
        )


def _forward(policy: Policy, batch: MultimodalBatch, at: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Return log-probs (N,) and entropies (N,) of the tokens that the positions `at` predict; see `predicting`. The
    `options` of `Policy.forward` may add results."""
    packing = batch.packing if isinstance(batch, PackedBatch) else None
    return policy(model_inputs(batch), at, packing, batch.experts, **options)


def _of_trained_tokens(batch: MultimodalBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tensors (N,) on `device` for the N trained tokens: the sampler's log-probs and the advantages."""
    assert batch.advantages is not None
    trained = batch.loss_mask[:, 1:]
    behavior, advantages = (
        to_device(values[:, 1:][trained].float(), device) for values in (batch.behavior_logprobs, batch.advantages)
    )
    return behavior, advantages


def _learning_rates(settings: TrainerSettings) -> Callable[[float], float]:
    """Return the learning rate as a function of the step, 1, 2, ..."""
    return partial(
        learning_rate,
        peak=settings.learning_rate,
        warmup=settings.warmup_steps,
        steps=settings.max_steps,
        scheduler=settings.lr_scheduler,
    )


def _parameter_groups(model: nn.Module, settings: TrainerSettings) -> list[ParameterGroup]:
    """Return the trained parameters in two groups: matrices, and vectors (norms, biases) without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = _learning_rates(settings)
    return [
        ParameterGroup("matrices", [p for p in trained if p.ndim >= 2], rate, settings.weight_decay),
        ParameterGroup("vectors", [p for p in trained if p.ndim < 2], rate, 0.0),
    ]
