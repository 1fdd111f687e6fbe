"""A run with its servers and its trainer up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

from anyio.from_thread import start_blocking_portal

from components.adapters import get_adapter
from components.artifacts.images import ImageStore
from components.artifacts.store import ArtifactStore
from components.contracts.errors import TrainerError
from components.contracts.stages import Artifact, StageContext
from components.inference.checkpoint import vocabulary
from components.inference.pool import ServerPool
from components.models.load import load_processor
from components.models.source import locate
from components.rl.run import RLRun
from components.rl.settings import TrainVLMSettings
from components.rl.skipped import skipped_batches
from components.training.client import TrainerClient
from components.training.service_settings import TrainerPolicySettings


@contextmanager
def open_run(
    settings: TrainVLMSettings,
    inputs: Mapping[str, Artifact],
    context: StageContext,
    store: ArtifactStore,
    load_on_join: bool = True,
) -> Iterator[tuple[RLRun, int]]:
    """The run with its servers and its trainer up, and the last step that the trainer has saved.

    Servers that somebody else started are given the run's weights, unless `load_on_join` is False.
    """
    weights = locate(inputs["model"].path, settings.model.revision)
    policy = TrainerPolicySettings(
        model_path=weights,
        model=settings.model,
        trainer=settings.trainer,
        temperature=settings.rollouts.sampling.temperature,
        images=context.images,
    )
    trainer = TrainerClient(policy, context.machine, context.workspace / "trainer")
    adapter = get_adapter(
        weights,
        load_processor(weights, settings.model),
        ImageStore(context.images).open,
        settings.batches.max_sequence_tokens,
    )
    servers = ServerPool(
        weights,
        settings.inference,
        context.machine,
        log_folder=context.workspace / "logs",
        forbidden_token_ids=sorted(adapter.collator.forbidden_token_ids),
        load_on_join=load_on_join,
    )
    with ThreadPoolExecutor(1) as starter, start_blocking_portal(name="servers") as portal:
        context.events.message("starting the trainer and the servers")
        resumed = starter.submit(_start, trainer)
        try:
            with portal.wrap_async_context_manager(servers) as pool:
                done = resumed.result()
                run = RLRun(settings, inputs, context, store, adapter, pool, trainer, portal)
                with closing(run.environment):
                    run.vocabulary = vocabulary(weights)
                    named, last = context.machine.skip_batches, settings.trainer.max_steps
                    run.skipped = skipped_batches(context.workspace, named, done, last)
                    if done:
                        context.events.message(f"resuming after step {done}")
                        run.complete_history(done)
                        run.sync(done)
                    yield run, done
        finally:
            with suppress(TrainerError):  # one that did not start has said so, or something worse has
                resumed.result()
            trainer.stop()


def _start(trainer: TrainerClient) -> int:
    trainer.start()
    return trainer.resume()
