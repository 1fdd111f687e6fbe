"""The stage `model`: it writes a tiny checkpoint, or a reference to a checkpoint elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.hub import HUB, commit_of
from armature.components.models.gguf import model_source
from armature.components.models.settings import ModelSettings


def run_model(settings: ModelSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext) -> StageReport:
    """Write the checkpoint of a tiny/<family> source to `out`, or a reference (`source.json`) to a folder or a hub
    name.

    Weights of a folder or a hub name are not copied; `load_model(out, ...)` follows the reference.

    Raises:
        ConfigurationError: the family is unknown, or a hub name has no revision.
        DataError: the folder or repository does not exist, or has no safetensors files or no configuration.
    """
    if settings.tiny is not None and settings.tiny_family is not None:
        from armature.components.models.tiny import make_tiny_checkpoint

        make_tiny_checkpoint(settings.tiny_family, out, settings.tiny.seed, settings.tiny, settings.image_attention)
        context.events.message(f"model: made {settings.source} from seed {settings.tiny.seed}")
        return StageReport()
    from armature.components.models.load import check_sizes, load_config
    from armature.components.models.source import locate, make_reference

    reference = make_reference(model_source(settings.source), settings.revision)
    reference.write(out)
    check_sizes(load_config(out, settings), locate(out))
    commit = f" at {reference.commit}" if reference.commit else ""
    context.events.message(f"model: uses {settings.source}{commit}")
    return StageReport()


def model_sources(settings: ModelSettings, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Return the digest of a checkpoint folder. The artifact depends on it in addition to its settings."""
    from armature.components.models.source import folder_sources

    return {} if settings.tiny is not None else folder_sources(model_source(settings.source))


def at_commit(settings: ModelSettings, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> ModelSettings:
    """Return the settings with the revision of a hub name resolved to its commit.

    Raises:
        DataError: see `hub_commit`.
    """
    name = model_source(settings.source)
    if settings.tiny is not None or settings.revision is None or not HUB.fullmatch(name) or Path(name).is_dir():
        return settings
    return settings.model_copy(update={"revision": commit_of(name, settings.revision, "model", say)})


MODEL_STAGE = Stage("model", 3, ModelSettings, (), run_model, model_sources, at_commit)
"""The stage that provides the initial weights of a training or the weights of an evaluation."""
