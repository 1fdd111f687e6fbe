"""The stage `model`: a tiny checkpoint in full, or a reference to one that lies elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from components.contracts.stages import Artifact, Stage, StageContext, StageReport
from components.models.settings import ModelSettings


def run_model(settings: ModelSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext) -> StageReport:
    """Write the checkpoint of a tiny/<family> source to `out`, or `source.json` for a folder or a hub name.

    The weights of a folder or a hub name are not copied; `load_model(out, ...)` follows the reference.

    Raises:
        ConfigurationError: unknown family, or a hub name without a revision.
        DataError: no such folder or repository, no safetensors, or no configuration.
    """
    if settings.tiny is not None and settings.tiny_family is not None:
        from components.models.tiny import make_tiny_checkpoint

        make_tiny_checkpoint(settings.tiny_family, out, settings.tiny.seed, settings.tiny, settings.image_attention)
        context.events.message(f"model: made {settings.source} from seed {settings.tiny.seed}")
        return StageReport()
    from components.models.load import load_config, refuse_other_sizes
    from components.models.source import locate, make_reference

    reference = make_reference(settings.source, settings.revision)
    reference.write(out)
    refuse_other_sizes(load_config(out, settings), locate(out))
    commit = f" at {reference.commit}" if reference.commit else ""
    context.events.message(f"model: refers to {settings.source}{commit}")
    return StageReport()


MODEL_STAGE = Stage(name="model", version=2, settings=ModelSettings, inputs=(), run=run_model)
