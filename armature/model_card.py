"""The README.md of an exported checkpoint: what the hub reads above, what people read below."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from yaml import YAMLError  # type: ignore[import-untyped]

from armature.components.hub import HUB
from armature.components.models.source import SourceReference
from armature.recipe_text import toml_text
from armature.training_record import CheckpointEvaluation, TrainingRecord

Form = Literal["merged", "adapter", "lerobot"]
LIBRARIES: Mapping[Form, str] = {"merged": "transformers", "adapter": "peft", "lerobot": "lerobot"}
TASKS: Mapping[Form, str] = {"merged": "image-text-to-text", "adapter": "image-text-to-text", "lerobot": "robotics"}
RATES = ("accuracy", "success")
"""What is measured of a checkpoint: the first of these that an evaluation has, with its interval."""


def model_card(record: TrainingRecord | None, name: str, form: Form, remote_code: bool = False) -> str:
    """The card of `record`'s checkpoint in a form, called `name`: the hub's, or a folder's.

    Everything in it is data: text of recipes and datasets stands in YAML strings, in code blocks, or escaped.
    """
    body = "\n\n".join(_body(record, name, form, remote_code))
    return f"---\n{_data(record, name, form).to_yaml()}\n---\n\n{body}\n"


def _data(record: TrainingRecord | None, name: str, form: Form) -> ModelCardData:
    known: dict[str, Any] = {"library_name": LIBRARIES[form], "pipeline_tag": TASKS[form], "tags": ["armature"]}
    if record is None:
        return ModelCardData(**known)
    base, dataset = _hub_base(record), _dataset(record)
    if base is not None:
        known |= {"base_model": base.source, **_license(base)}
        known["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
    if record.trained:
        known["tags"].append("sft" if record.manifest.kind == "sft" else _method(record))
    if HUB.fullmatch(dataset.get("type", "")):
        known["datasets"] = [dataset["type"]]
    if results := list(_results(record, form, dataset)):
        known |= {
            "eval_results": results,
            "model_name": name,
            "metrics": sorted({each.metric_type for each in results}),
        }
    return ModelCardData(**known)


def _method(record: TrainingRecord) -> str:
    return "imitation-learning" if record.flow == "train-vla" else "reinforcement-learning"


def _hub_base(record: TrainingRecord) -> SourceReference | None:
    return record.base if record.base is not None and record.base.commit is not None else None


def _license(base: SourceReference) -> dict[str, str]:
    """What the base's own card says, if it was fetched."""
    try:
        path = hf_hub_download(base.source, "README.md", revision=base.commit, local_files_only=True)
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (LocalEntryNotFoundError, YAMLError, ValueError, OSError):
        return {}
    return {key: data[key] for key in ("license", "license_name", "license_link") if isinstance(data.get(key), str)}


def _dataset(record: TrainingRecord) -> dict[str, str]:
    """type: a hub name, or what the environment or the kind of data is called; revision: its commit, of a hub name."""
    recipe = record.recipe()
    environment, dataset = recipe.get("environment") or {}, recipe.get("dataset") or {}
    args = environment.get("args") or dataset
    source, revision = str(args.get("source") or args.get("path") or ""), args.get("revision")
    if revision and HUB.fullmatch(source):
        return {"type": source, "name": source, "revision": str(revision)}
    name = str(environment.get("name") or ("dataset" if dataset else "libero"))
    return {"type": name, "name": Path(source).name or name}


def _results(record: TrainingRecord, form: Form, dataset: Mapping[str, str]) -> Iterator[EvalResult]:
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
    yield f"# {_plain(name)}"
    if record is None:
        yield "Exported with Armature from a folder that is not an artifact: how it was made is not known."
    else:
        made = f"trained by Armature's `{record.manifest.kind}`" if record.trained else "not trained"
        base = _hub_base(record)
        yield f"`{base.source}`, {made}." if base else f"A checkpoint, {made}."
    yield f"## Use\n\n{_usage(record, name, form, remote_code)}"
    if record is None:
        return
    if rows := list(_evaluation_rows(record)):
        head = "| tasks of | seed | before | after |\n|---|---|---|---|"
        note = "Shares of solved tasks with 95 % intervals. Before: of what the training began with."
        yield "\n".join(["## Evaluation", "", note, "", head, *rows])
    yield "\n".join(["## Lineage", "", "| | |", "|---|---|", *_lineage_rows(record)])
    recipe = toml_text({"flow": record.flow, **record.recipe()})
    yield f"## Recipe\n\nEvery value that is known, defaults included.\n\n{_fenced(recipe, 'toml')}"


def _usage(record: TrainingRecord | None, name: str, form: Form, remote_code: bool) -> str:
    if form == "lerobot":
        code = (
            "from lerobot.policies.factory import make_pre_post_processors\n"
            "from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy\n\n"
            f"policy = MolmoAct2Policy.from_pretrained({name!r})\n"
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
    """A line for each split and each way of evaluating, before and after beside each other."""
    lines: dict[tuple[str, str], dict[bool, str]] = {}
    names: dict[tuple[str, str], str] = {}
    for each in record.evaluations:
        for split, numbers in _splits(each):
            if _rate(numbers) is not None:
                key = (str(each.settings), split)
                lines.setdefault(key, {})[each.before] = _said(numbers)
                names[key] = f"{_plain(split)} | {_seed(each)}"
    for key, cells in lines.items():
        yield f"| {names[key]} | {cells.get(True, 'not measured')} | {cells.get(False, 'not measured')} |"


def _splits(each: CheckpointEvaluation) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The numbers of the first split are at the top, those of the others under their names."""
    settings = each.settings.get("evaluation") or {}
    first, *more = settings.get("splits") or [", ".join(settings.get("suites") or ["heldout"])]
    yield str(first), each.numbers
    yield from ((split, each.numbers[split]) for split in more if split in each.numbers)


def _rate(numbers: Mapping[str, Any]) -> str | None:
    return next((key for key in RATES if {key, f"{key}_low", f"{key}_high"} <= numbers.keys()), None)


def _counts(numbers: Mapping[str, Any]) -> dict[str, int]:
    return {key: numbers[key] for key in ("tasks", "episodes") if isinstance(numbers.get(key), int)}


def _said(numbers: Mapping[str, Any]) -> str:
    rate = _rate(numbers)
    assert rate is not None
    counts = ", ".join(f"{count} {key}" for key, count in _counts(numbers).items())
    return f"{numbers[rate]:.3f} [{numbers[f'{rate}_low']:.3f}, {numbers[f'{rate}_high']:.3f}], {counts}"


def _seed(each: CheckpointEvaluation) -> Any:
    return (each.settings.get("evaluation") or {}).get("seed", "")


def _lineage_rows(record: TrainingRecord) -> Iterator[str]:
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
    """Text that Markdown and HTML leave as it is, on one line."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _fenced(code: str, language: str) -> str:
    """A code block that nothing in `code` ends."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.strip()}\n{fence}"
