"""Write the model card (README.md) of an exported checkpoint: metadata for the hub, then a text for people."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from pydantic import BaseModel
from yaml import YAMLError  # type: ignore[import-untyped]

from armature.components.artifacts.manifest import MANIFEST, Manifest, open_artifact, read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import merge, settings_in
from armature.components.configuration.recipes import RECIPES
from armature.components.configuration.stages import STAGES
from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.stages import Artifact
from armature.components.machine.hub import HUB
from armature.components.models.source import REFERENCE, SourceReference
from armature.show import toml_text

# --- The record of a checkpoint: how it was made and evaluated, read from artifacts ---

START = ("model", "policy")
"""Kinds of artifacts that are untrained checkpoints. They are also the names of the stage inputs from which a training
begins."""
EVALUATIONS = ("evaluate", "evaluate-libero")
"""Kinds of artifacts that are evaluations of a checkpoint."""
SECONDS = 5.0
"""Seconds to wait for MLflow to answer."""


@dataclass(frozen=True)
class CheckpointEvaluation:
    """One evaluation of the trained checkpoint, or of the checkpoint that the training began with."""

    before: bool
    """True if the evaluated checkpoint is the one that the training began with."""
    digest: str
    """Digest of the evaluation's artifact."""
    settings: Mapping[str, Any]
    """Settings of the evaluation."""
    numbers: Mapping[str, Any]
    """Contents of the evaluation's metrics.json."""


@dataclass(frozen=True)
class TrainingRecord:
    """The history of a checkpoint: how it was made and evaluated, as far as the store has the artifacts."""

    artifact: Artifact
    manifest: Manifest
    base: SourceReference | None
    """The public checkpoint or folder from which its first training began; None if the first weights were drawn from a
    seed."""
    inputs: Mapping[str, tuple[str, Manifest]] = field(default_factory=dict)
    """All artifacts that the checkpoint was made from, directly or indirectly. The key is an artifact's digest, and the
    value is the name of the stage input that it was, with its manifest."""
    evaluations: tuple[CheckpointEvaluation, ...] = ()
    commit: str = ""
    """Git commit of the code that made the checkpoint; empty if MLflow does not have the run."""

    @property
    def flow(self) -> str:
        """Name of the flow that makes checkpoints of this kind."""
        return self.manifest.kind if self.manifest.kind in ("train-vla", "train-vla-rl") else "train-vlm"

    @property
    def trained(self) -> bool:
        """True unless the checkpoint is the untrained start of a training."""
        return self.manifest.kind not in START

    @property
    def adapter_stands_on_base(self) -> bool:
        """True if the training began with the base itself, and not with a checkpoint trained from it."""
        kinds = [manifest.kind for name, manifest in self.inputs.values() if name in START]
        return self.base is not None and kinds == ["model"]

    def recipe(self) -> dict[str, Any]:
        """Return the sections of the recipe that made the checkpoint, with all values that its artifacts record."""
        values: dict[str, Any] = {}
        fields = RECIPES[self.flow].model_fields
        for manifest in [self.manifest, *(manifest for _, manifest in self.inputs.values())]:  # these record commits
            values = merge(values, dict(_sections(manifest, self.flow)))
        for each in self.evaluations:
            for name in set(each.settings) & set(fields):
                later = getattr(next(settings_in(fields[name].annotation)), "AFTER_TRAINING", ())
                training = {key: value for key, value in (values.get(name) or {}).items() if key not in later}
                values[name] = merge(each.settings[name], training)
        return {name: values[name] for name in fields if values.get(name) is not None}


def read_record(source: Path, store: Path) -> TrainingRecord | None:
    """Return how the checkpoint in the folder `source` was made; None if the folder is not an artifact.

    Earlier artifacts and evaluations are looked up in the artifact store in the folder `store`.

    Raises:
        DataError: the artifact's files have changed since it was made.
    """
    if not (source / MANIFEST).is_file():
        return None
    artifact, manifest = open_artifact(source), read_manifest(source)
    artifacts = {each.digest: each for each in ArtifactStore(store)} if store.is_dir() else {}
    inputs = {digest: (name, each) for name, digest, each in _inputs(manifest, artifacts)}
    start = next((manifest.inputs[name] for name in START if name in manifest.inputs), None)
    return TrainingRecord(
        artifact,
        manifest,
        _base(source, manifest, inputs, artifacts),
        inputs,
        tuple(_evaluations(manifest, {artifact.digest: False, start: True}, artifacts.values())),
        _commit(artifact.digest),
    )


def _inputs(manifest: Manifest, artifacts: Mapping[str, Artifact]) -> Iterator[tuple[str, str, Manifest]]:
    """Yield input name, digest and manifest of each artifact that an artifact was made from, directly or indirectly.

    Inputs that are not among `artifacts`, the artifacts of the store by digest, are left out.
    """
    for name, digest in manifest.inputs.items():
        if digest in artifacts:
            source = read_manifest(artifacts[digest].path)
            yield name, digest, source
            yield from _inputs(source, artifacts)


def _base(
    source: Path, manifest: Manifest, inputs: Mapping[str, tuple[str, Manifest]], artifacts: Mapping[str, Artifact]
) -> SourceReference | None:
    """Return the public checkpoint or folder from which the first training began, or None."""
    kinds = {digest: each.kind for digest, (_, each) in inputs.items()}
    folders = [artifacts[digest].path for digest, kind in kinds.items() if kind in START]
    for folder in [source, *folders] if manifest.kind in START else folders:
        if (folder / REFERENCE).is_file():
            return SourceReference.model_validate_json((folder / REFERENCE).read_text())
    return None


def _evaluations(
    manifest: Manifest, checkpoints: Mapping[str | None, bool], artifacts: Any
) -> Iterator[CheckpointEvaluation]:
    """Yield the evaluations that used the tasks of the training; those before the training come first.

    `checkpoints` has the digests of the evaluated checkpoints, and True for the one before the training.
    """
    evaluations = []
    for each in artifacts:
        if each.kind not in EVALUATIONS:
            continue
        made = read_manifest(each.path)
        played = next((made.inputs[name] for name in START if name in made.inputs), None)
        if played in checkpoints and made.inputs.get("tasks") == manifest.inputs.get("tasks"):
            numbers = json.loads((each.path / "metrics.json").read_text())
            evaluations.append(CheckpointEvaluation(checkpoints[played], each.digest, made.settings, numbers))
    yield from sorted(evaluations, key=lambda each: (not each.before, json.dumps(each.settings, sort_keys=True)))


def _sections(manifest: Manifest, flow: str) -> Iterator[tuple[str, Any]]:
    """Yield name and values of each section of the flow's recipe that a stage's settings contain.

    The settings of a stage are one section, or a table with several sections.
    """
    fields: dict[str, list[type[BaseModel]]] = {
        name: list(settings_in(each.annotation)) for name, each in RECIPES[flow].model_fields.items()
    }
    kind = STAGES[manifest.kind].settings
    section = next((name for name, classes in fields.items() if kind in classes), None)
    if section is not None:
        yield section, manifest.settings
    else:
        yield from ((name, part) for name, part in manifest.settings.items() if name in fields)


def _commit(digest: str) -> str:
    """Return the git commit of the code that made an artifact; "" if MLflow is not used here or does not know it."""
    if "MLFLOW_TRACKING_URI" not in os.environ and not Path(".armature/mlflow.db").is_file():
        return ""
    from armature.tasks.lineage import code_commit
    from armature.tasks.patience import patience

    with suppress(ArmatureError), patience(SECONDS):
        return code_commit(digest)
    return ""


Form = Literal["merged", "adapter", "lerobot"]
"""Layout of an export: a Hugging Face model with the adapter merged in, only the adapter, or a LeRobot policy."""
LIBRARIES: Mapping[Form, str] = {"merged": "transformers", "adapter": "peft", "lerobot": "lerobot"}
TASKS: Mapping[Form, str] = {"merged": "image-text-to-text", "adapter": "image-text-to-text", "lerobot": "robotics"}
RATES = ("accuracy", "success")
"""Metrics that a card may show. Of each evaluation, it shows the first of these that the evaluation has, with its
interval."""


def model_card(record: TrainingRecord | None, name: str, form: Form, remote_code: bool = False) -> str:
    """Return the model card of an exported checkpoint.

    Text from recipes and datasets is escaped, or stands in YAML strings and code blocks, so that it cannot add markup.

    Args:
        record: how the checkpoint was made; None if that is not known.
        name: the model's name on the hub, or its folder.
        form: layout of the export.
        remote_code: the model needs `trust_remote_code`.
    """
    body = "\n\n".join(_body(record, name, form, remote_code))
    return f"---\n{_data(record, name, form).to_yaml()}\n---\n\n{body}\n"


def _data(record: TrainingRecord | None, name: str, form: Form) -> ModelCardData:
    """Return the metadata that the hub reads: library, base model, license, dataset and results."""
    data: dict[str, Any] = {"library_name": LIBRARIES[form], "pipeline_tag": TASKS[form], "tags": ["armature"]}
    if record is None:
        return ModelCardData(**data)
    base, dataset = _hub_base(record), _dataset(record)
    if base is not None:
        data |= {"base_model": base.source, **_license(base)}
        data["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
    if record.trained:
        data["tags"].append(_method(record))
    if HUB.fullmatch(dataset.get("type", "")):
        data["datasets"] = [dataset["type"]]
    if results := list(_results(record, form, dataset)):
        data |= {
            "eval_results": results,
            "model_name": name,
            "metrics": sorted({each.metric_type for each in results}),
        }
    return ModelCardData(**data)


def _method(record: TrainingRecord) -> str:
    """Return the hub tag for the method of the training."""
    if record.manifest.kind in ("sft", "warm-start"):
        return "dpo" if record.manifest.settings.get("dpo") else "sft"
    return "imitation-learning" if record.flow == "train-vla" else "reinforcement-learning"


def _hub_base(record: TrainingRecord) -> SourceReference | None:
    """Return the base model if it is a checkpoint on the hub, else None."""
    return record.base if record.base is not None and record.base.commit is not None else None


def _license(base: SourceReference) -> dict[str, str]:
    """Return the license fields of the base model's card, if the card is in the local hub cache."""
    try:
        path = hf_hub_download(base.source, "README.md", revision=base.commit, local_files_only=True)
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (LocalEntryNotFoundError, YAMLError, ValueError, OSError):
        return {}
    return {key: data[key] for key in ("license", "license_name", "license_link") if isinstance(data.get(key), str)}


def _dataset(record: TrainingRecord) -> dict[str, str]:
    """Return the fields "type" and "name" of the training data for the hub's metadata.

    For a dataset on the hub, both are its hub name, and the field "revision" has its commit.
    """
    recipe = record.recipe()
    environment, dataset = recipe.get("environment") or {}, recipe.get("dataset") or {}
    args = environment.get("args") or dataset
    source, revision = str(args.get("source") or args.get("path") or ""), args.get("revision")
    if revision and HUB.fullmatch(source):
        return {"type": source, "name": source, "revision": str(revision)}
    name = str(environment.get("name") or ("dataset" if dataset else "libero"))
    return {"type": name, "name": Path(source).name or name}


def _results(record: TrainingRecord, form: Form, dataset: Mapping[str, str]) -> Iterator[EvalResult]:
    """Yield, for the hub's metadata, the result on each split in each evaluation after the training."""
    for each in record.evaluations:
        if each.before:
            continue
        for split, numbers in _splits(each):
            rate = _rate(numbers)
            if rate is not None:
                yield EvalResult(
                    task_type=TASKS[form],
                    dataset_type=dataset["type"],
                    dataset_name=dataset["name"],
                    dataset_split=split,
                    dataset_revision=dataset.get("revision"),
                    metric_type=rate,
                    metric_value=float(numbers[rate]),
                    metric_name=f"{rate}, seed {_seed(each)}",
                    metric_args={
                        "interval_95": [float(numbers[f"{rate}_low"]), float(numbers[f"{rate}_high"])],
                        **_counts(numbers),
                    },
                )


def _body(record: TrainingRecord | None, name: str, form: Form, remote_code: bool) -> Iterator[str]:
    """Yield the paragraphs and sections of the card below its metadata."""
    yield f"# {_plain(name)}"
    if record is None:
        yield "Exported with Armature from a folder that is not an artifact. It is not known how it was made."
    else:
        made = f"trained by Armature's `{record.manifest.kind}`" if record.trained else "not trained"
        base = _hub_base(record)
        yield f"`{base.source}`, {made}." if base else f"A checkpoint, {made}."
    yield f"## Use\n\n{_usage(record, name, form, remote_code)}"
    if record is None:
        return
    if rows := list(_evaluation_rows(record)):
        head = "| tasks of | seed | before | after |\n|---|---|---|---|"
        note = "Share of solved tasks with 95 % interval, before and after the training."
        yield "\n".join(["## Evaluation", "", note, "", head, *rows])
    yield "\n".join(["## Lineage", "", "| | |", "|---|---|", *_lineage_rows(record)])
    recipe = toml_text({"flow": record.flow, **record.recipe()})
    yield f"## Recipe\n\nAll recorded values, defaults included.\n\n{_fenced(recipe, 'toml')}"


def _usage(record: TrainingRecord | None, name: str, form: Form, remote_code: bool) -> str:
    """Return code blocks that show how to load and serve the model."""
    if form == "lerobot":
        code = (
            "from lerobot.configs.policies import PreTrainedConfig\n"
            "from lerobot.policies.factory import get_policy_class, make_pre_post_processors\n\n"
            f"policy = get_policy_class(PreTrainedConfig.from_pretrained({name!r}).type).from_pretrained({name!r})\n"
            f"preprocess, postprocess = make_pre_post_processors(policy.config, pretrained_path={name!r})"
        )
        return _fenced(code, "python")
    trust = ", trust_remote_code=True" if remote_code else ""
    head = "from transformers import AutoModelForImageTextToText, AutoProcessor\n\n"
    if form == "adapter":
        assert record is not None and record.base is not None
        base = f"{record.base.source!r}, revision={record.base.commit!r}" if _hub_base(record) else '"path/to/the/base"'
        code = (
            f"from peft import PeftModel\n{head}"
            f'model = AutoModelForImageTextToText.from_pretrained({base}, dtype="auto"{trust})\n'
            f"model = PeftModel.from_pretrained(model, {name!r})\n"
            f"processor = AutoProcessor.from_pretrained({base}{trust})"
        )
        return _fenced(code, "python")
    code = (
        f'{head}model = AutoModelForImageTextToText.from_pretrained({name!r}, dtype="auto"{trust})\n'
        f"processor = AutoProcessor.from_pretrained({name!r}{trust})"
    )
    serve = f"vllm serve {name}{' --trust-remote-code' if remote_code else ''}"
    return f"{_fenced(code, 'python')}\n\n{_fenced(serve, 'bash')}"


def _evaluation_rows(record: TrainingRecord) -> Iterator[str]:
    """Yield one row of the table of results for each split and each distinct settings of an evaluation.

    A row has the result before and the result after the training.
    """
    lines: dict[tuple[str, str], dict[bool, str]] = {}
    names: dict[tuple[str, str], str] = {}
    for each in record.evaluations:
        for split, numbers in _splits(each):
            if _rate(numbers) is not None:
                key = (str(each.settings), split)
                lines.setdefault(key, {})[each.before] = _with_interval(numbers)
                names[key] = f"{_plain(split)} | {_seed(each)}"
    for key, cells in lines.items():
        yield f"| {names[key]} | {cells.get(True, 'not measured')} | {cells.get(False, 'not measured')} |"


def _splits(each: CheckpointEvaluation) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the metrics of each split of an evaluation.

    In metrics.json, the metrics of the first split are at the top level, and each further split has a table with its
    name.
    """
    settings = each.settings.get("evaluation") or {}
    first, *more = settings.get("splits") or [", ".join(settings.get("suites") or ["heldout"])]
    yield str(first), each.numbers
    yield from ((split, each.numbers[split]) for split in more if split in each.numbers)


def _rate(numbers: Mapping[str, Any]) -> str | None:
    """Return the first metric of `RATES` that `numbers` has with its interval, or None."""
    return next((key for key in RATES if {key, f"{key}_low", f"{key}_high"} <= numbers.keys()), None)


def _counts(numbers: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of tasks and episodes of an evaluation, as far as its metrics contain them."""
    return {key: numbers[key] for key in ("tasks", "episodes") if isinstance(numbers.get(key), int)}


def _with_interval(numbers: Mapping[str, Any]) -> str:
    """Return the rate of an evaluation as text, with its interval and the numbers of tasks and episodes."""
    rate = _rate(numbers)
    assert rate is not None
    counts = ", ".join(f"{count} {key}" for key, count in _counts(numbers).items())
    return f"{numbers[rate]:.3f} [{numbers[f'{rate}_low']:.3f}, {numbers[f'{rate}_high']:.3f}], {counts}"


def _seed(each: CheckpointEvaluation) -> Any:
    """Return the seed of an evaluation, or "" if its settings have none."""
    return (each.settings.get("evaluation") or {}).get("seed", "")


def _lineage_rows(record: TrainingRecord) -> Iterator[str]:
    """Yield the rows of the table of the artifacts and code that the checkpoint was made from."""
    rows: dict[str, str] = {"checkpoint": f"artifact `{record.artifact.digest}`"}
    if record.base is not None:
        named = f"{record.base.source} at `{record.base.commit}`" if _hub_base(record) else "a folder"
        rows["base model"] = f"{named}, SHA-256 `{record.base.checkpoint_sha256}`"
    elif model := record.recipe().get("model"):
        rows["base model"] = f"{_plain(str(model.get('source')))}, made from a seed"
    for digest, (name, manifest) in record.inputs.items():
        counts = ", ".join(f"{count} {_plain(key)}" for key, count in manifest.rows.items())
        rows[_plain(name)] = f"artifact `{digest}`" + (f": {counts}" if counts else "")
    for name, digest in record.manifest.inputs.items():
        if digest not in record.inputs:
            rows[_plain(name)] = f"artifact `{digest}`"
    rows |= {f"digest of {_plain(name)}": f"`{_plain(digest)}`" for name, digest in record.manifest.sources.items()}
    for each in record.evaluations:
        when = "before" if each.before else "after"
        rows[f"evaluation {when}, seed {_seed(each)}"] = f"artifact `{each.digest}`"
    rows["Armature"] = _plain(record.manifest.code_version)
    if record.commit:
        rows["commit of the code"] = f"`{_plain(record.commit)}`"
    yield from (f"| {key} | {value} |" for key, value in rows.items())


def _plain(text: str) -> str:
    """Escape text for Markdown and HTML, and put it on one line."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _fenced(code: str, language: str) -> str:
    """Return a fenced code block whose fence is longer than any run of backticks in `code`."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.strip()}\n{fence}"
