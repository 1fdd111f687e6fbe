"""Checkpoints out: what `armature export` writes, its card, and what of it arrives at a hub."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from armature.cli import app
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import Recipe, build_recipe, load_recipe
from armature.components.configuration.stages import run_stage
from armature.components.contracts.stages import Artifact
from armature.components.evaluation.results import EpisodeResult, metrics
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.models.load import load_model, load_processor
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.components.rl.settings import TrainVLMSettings
from armature.components.robots.evaluation.settings import EvaluateLiberoStageSettings
from armature.components.robots.rl.settings import TrainVLARLSettings
from armature.components.training.ranks import Ranks
from armature.components.vlm.publish import Publisher
from armature.export import export, push
from armature.model_card import CheckpointEvaluation, TrainingRecord, model_card, read_record
from tests.builders import make_machine
from tests.hub_server import TOKEN, HubServer, serve_hub
from tests.refusals import refused

BASE = "someone/small"
SOURCES = {"code": "c0de" * 16, "data": "da7a" * 16}
LICENSE = b"---\nlicense: other\nlicense_name: a-license\n---\n# A model\n"
HOSTILE = 'A "recipe": |\n---\n```\n<script>alert(1)</script>\n# title'


@dataclass(frozen=True)
class Trained:
    """The artifacts of a training that began with a model of the hub. They are as the real stages write them, but no
    optimizer step was made."""

    store: Path
    artifact: Artifact
    recipe: Recipe
    commit: str
    hub: HubServer


def results(solved: int, count: int = 20) -> list[EpisodeResult]:
    one = EpisodeResult("", "", "heldout", "all", False, 0.0, {}, 1, 3, 0, 0, False, None)
    return [
        replace(one, trajectory_id=f"{n:02d}", task_id=f"{n:02d}", solved=n < solved, reward=float(n < solved))
        for n in range(count)
    ]


def write(
    store: ArtifactStore,
    kind: str,
    name: str,
    settings: Any,
    inputs: dict[str, Artifact],
    fill: Callable[[Path], object],
) -> Artifact:
    def filled(folder: Path) -> None:
        fill(folder)
        digests = {key: each.digest for key, each in inputs.items()}
        values = settings.model_dump(mode="json")
        facts: dict[str, Any] = {"kind_version": 1, "rows": {}, "drops": {}, "sources": SOURCES}
        write_manifest(folder, kind=kind, inputs=digests, settings=values, **facts)

    return store.write(kind, name, filled)


def _write_text(text: str, folder: Path) -> None:
    (folder / "metrics.json").write_text(text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[Trained]:
    root = tmp_path_factory.mktemp("export")
    with serve_hub(root / "hub-cache") as hub:
        folder = make_tiny_checkpoint("qwen2-vl", root / "base", seed=0, settings=SMALL)
        files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": LICENSE}
        commit = hub.add("model", BASE, files)
        rows = [
            {"question": f"{HOSTILE} {n}", "answer": "red", "split": "train" if n % 2 else "test"} for n in range(8)
        ]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values: dict[str, Any] = {
            "description": HOSTILE,
            "model": {"source": BASE, "revision": "main", "dtype": "float32", "lora": {"rank": 2}},
            "environment": {
                "name": "dataset",
                "args": {
                    "source": str(root / "rows.jsonl"),
                    "prompt": "{question}",
                    "answer": "answer",
                    "split": {"by": "column"},
                    "rewards": [{"name": "exact_match"}],
                },
            },
            "inference": {"max_model_len": 512},
            "rollouts": {"groups_per_step": 2, "sampling": {"max_tokens": 4}},
            "batches": {"max_sequence_tokens": 512},
            "trainer": {"objective": {"name": "ppo"}, "learning_rate": 1e-3, "max_steps": 2},
            "evaluation": {"sampling": {"max_tokens": 4}, "seed": 7},
            "machine": {"store": str(root / "store")},
        }
        recipe = build_recipe("train-vlm/mine", values, where="test")
        machine, store = make_machine(store=root / "store"), ArtifactStore(root / "store")
        tasks = run_stage("tasks", recipe.sections["environment"], {}, machine)
        start = run_stage("model", recipe.sections["model"], {}, machine)

        def train(out: Path) -> None:
            settings = recipe.sections["model"]
            model = load_model(start.path, settings)
            generator = torch.Generator().manual_seed(0)
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.data.normal_(generator=generator)
            publisher = Publisher(model, load_processor(start.path, settings), root / "processor")
            publisher.publish(model, out / "checkpoint", Ranks())

        inputs = {"tasks": tasks, "model": start}
        made = write(store, "train-vlm", "0" * 20, recipe.settings_for(TrainVLMSettings), inputs, train)
        evaluation = recipe.settings_for(EvaluateStageSettings)
        for number, (model, solved) in enumerate([(start, 5), (made, 16)]):
            numbers = json.dumps(metrics(results(solved), ["heldout"]))
            fill = partial(_write_text, numbers)
            write(store, "evaluate", f"{number}" * 20, evaluation, {**inputs, "model": model}, fill)
        yield Trained(root / "store", made, recipe, commit, hub)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record_of(trained: Trained) -> TrainingRecord:
    return read_record(trained.artifact.path, trained.store)


def test_exported_model_loads_in_transformers_with_merged_weights(trained, tmp_path):
    out = export(trained.artifact.digest[:12], tmp_path / "out", trained.store)
    made = files_of(trained.artifact.path / "checkpoint")
    expected = {name: data for name, data in made.items() if not name.startswith("adapter/")}
    assert {name: data for name, data in files_of(out).items() if name != "README.md"} == expected
    loaded = AutoModelForImageTextToText.from_pretrained(out)
    base = AutoModelForImageTextToText.from_pretrained(trained.store.parent / "base")
    assert any(not torch.equal(value, base.state_dict()[name]) for name, value in loaded.state_dict().items())
    adapter = export(str(trained.artifact.path), tmp_path / "adapter", trained.store, adapter=True)
    assert set(files_of(adapter)) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE, trained.commit)
    joined = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(joined[name], value)
    saved = trained.artifact.path / "checkpoint/adapter/adapter_config.json"
    assert json.loads(saved.read_text())["revision"] is None  # the artifact is as it was
    with refused("output_exists", out):
        export(str(trained.artifact.path), out, trained.store)
    with refused("unknown_checkpoint", "0123456789", trained.store):
        export("0123456789", tmp_path / "other", trained.store)
    with refused("adapter_missing", out):
        export(str(out), tmp_path / "other", trained.store, adapter=True)
    with refused("adapter_base_unavailable", trained.artifact.path):
        export(str(trained.artifact.path), tmp_path / "other", tmp_path / "empty", adapter=True)


def test_model_card_has_lineage_and_results(trained, tmp_path):
    out = export(str(trained.artifact.path), tmp_path / "out", trained.store)
    card = ModelCard.load(out / "README.md")
    data, record = card.data, record_of(trained)
    assert (data.base_model, data.library_name, data.pipeline_tag) == (BASE, "transformers", "image-text-to-text")
    assert (data.license, data.license_name) == ("other", "a-license")
    assert "reinforcement-learning" in data.tags
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", 0.8, "heldout")
    numbers = metrics(results(16), ["heldout"])
    assert result.metric_args["interval_95"] == [numbers["accuracy_low"], numbers["accuracy_high"]]
    assert result.metric_args["tasks"] == 20
    index = metadata_load(out / "README.md")
    assert index is not None and index["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.8
    text = card.content
    assert "| heldout | 7 | 0.250 [" in text and "0.800 [" in text and "20 tasks, 20 episodes" in text
    facts = [trained.artifact.digest, trained.commit, record.base.checkpoint_sha256, *record.inputs]
    for fact in (*facts, *SOURCES.values()):
        assert fact in text
    assert f"vllm serve {tmp_path / 'out'}" in text and f"from_pretrained('{tmp_path / 'out'}'" in text


def test_recipe_in_model_card_has_the_same_fingerprint(trained):
    _, _, after = model_card(record_of(trained), "me/mine", "merged").partition("## Recipe")
    fence = after[after.index("```") :].split("toml", 1)[0]
    recipe = tomllib.loads(after.split(f"{fence}toml\n", 1)[1].split(f"\n{fence}\n", 1)[0])
    again = build_recipe("train-vlm/again", recipe, where="the card")
    for name, section in trained.recipe.sections.items():
        if name == "model":
            section = section.model_copy(update={"revision": trained.commit})
        if name != "machine":
            assert again.sections[name] == section, name


def test_model_card_recipe_has_evaluation_after_robot_training(trained):
    recipe = load_recipe("train-vla-rl/tiny", ["evaluation.every=5", "evaluation.perturbations={camera=[0.5]}"])
    settings, after = (
        recipe.settings_for(each).model_dump(mode="json") for each in (TrainVLARLSettings, EvaluateLiberoStageSettings)
    )
    record = record_of(trained)
    manifest = record.manifest.model_copy(update={"kind": "train-vla-rl", "settings": settings})
    evaluations = (CheckpointEvaluation(False, "", after, {}),)
    again = replace(record, manifest=manifest, inputs={}, evaluations=evaluations).recipe()
    assert again["evaluation"] == recipe.dump()["evaluation"]


def test_policy_card_names_lerobot_and_code_commit(trained):
    card = ModelCard(model_card(replace(record_of(trained), commit="0ddba11"), "me/robot", "lerobot"))
    assert (card.data.library_name, card.data.pipeline_tag) == ("lerobot", "robotics")
    assert (
        "get_policy_class(PreTrainedConfig.from_pretrained('me/robot').type).from_pretrained('me/robot')"
        in card.content
        and "vllm serve" not in card.content
    )
    assert "| commit of the code | `0ddba11` |" in card.content and SOURCES["code"] in card.content


def test_model_card_escapes_text_of_recipes_and_data(trained):
    record, name = record_of(trained), "me/my: model # | <b>"
    manifest = record.manifest.model_copy(
        update={"sources": {HOSTILE: HOSTILE}, "settings": {**record.manifest.settings, HOSTILE: {HOSTILE: [HOSTILE]}}}
    )
    environment = {"name": HOSTILE, "args": {"source": HOSTILE, "note": HOSTILE}}
    manifest = manifest.model_copy(update={"settings": {**manifest.settings, "environment": environment}})
    card = ModelCard(model_card(replace(record, manifest=manifest, inputs={}), name, "merged"))
    assert card.data.model_name == name and card.data.eval_results[0].dataset_type == HOSTILE
    outside = card.text.partition("## Recipe")[0]
    assert "<script>" not in outside and f"# {name}" not in outside and "\n---" not in outside
    fence = "`" * 4
    assert card.text.count(f"{fence}toml\n") == 1 and card.text.rstrip().endswith(f"\n{fence}")


@pytest.fixture
def hub(trained, monkeypatch) -> HubServer:
    """The hub of `trained`, without recorded requests, faults or tokens. The test's token is in HF_TOKEN."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    trained.hub.asked.clear()
    trained.hub.faults.clear()
    trained.hub.tokens.clear()
    return trained.hub


def test_push_uploads_the_export_to_a_private_repository(trained, hub, tmp_path, capsys):
    app(["push", str(trained.artifact.path), "me/mine", "--store", str(trained.store)], standalone_mode=False)
    output = capsys.readouterr()
    repository = hub.repositories["model", "me/mine"]
    assert repository.private and output.out.strip() == f"{hub.url}/me/mine/commit/{repository.branches['main']}"
    out = export(str(trained.artifact.path), tmp_path / "out", trained.store)
    arrived, expected = repository.files("main"), files_of(out)
    assert arrived.pop(".gitattributes")
    assert arrived.pop("README.md").decode() == model_card(record_of(trained), "me/mine", "merged")
    assert expected.pop("README.md") and arrived == expected
    assert hub.tokens == {TOKEN} and TOKEN not in output.out + output.err
    (out / "README.md").write_text("---\nlibrary_name: transformers\n---\nMy own words.\n")
    push(str(out), "me/public", trained.store, public=True, branch="v2")
    public = hub.repositories["model", "me/public"]
    assert not public.private and set(public.files("main")) == {".gitattributes"}
    assert {name: data for name, data in public.files("v2").items() if name != ".gitattributes"} == files_of(out)


def test_repeated_push_completes_and_removes_old_weights(trained, hub, tmp_path):
    out = export(str(trained.artifact.path), tmp_path / "out", trained.store)
    hub.faults.append((r"^POST /api/models/me/again/commit", 0))
    with refused("upload_failed", "me/again"):
        push(str(out), "me/again", trained.store)
    older = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"kept"}
    hub.repositories["model", "me/again"].commit("main", older)
    hub.asked.clear()
    push(str(out), "me/again", trained.store)
    files = hub.repositories["model", "me/again"].files("main")
    assert files.pop("notes.md") == b"kept" and files == files_of(out)
    assert not any(request.startswith("PUT /objects/") for request in hub.asked)  # they had arrived before


def test_rejects_invalid_push(trained, hub, tmp_path, monkeypatch):
    out = export(str(trained.artifact.path), tmp_path / "out", trained.store)

    def not_taken(name: str, code: str, *values: object, **how: Any) -> None:
        with refused(code, *values) as caught:
            push(str(out), name, trained.store, **how)
        assert TOKEN not in caught.exconly()

    not_taken("mine", "invalid_repository_name", "mine")
    not_taken("me/..", "invalid_repository_name", "me/..")
    not_taken("me/out", "export_has_no_parts", out, "--adapter", adapter=True)
    hub.add("dataset", "me/data", {"rows.jsonl": b"{}"})
    not_taken("me/data", "repository_is_a_dataset", "me/data")
    hub.add("model", "me/seen", {"README.md": b"---\nlibrary_name: transformers\n---\n"})
    not_taken("me/seen", "repository_visibility_mismatch", "--public")
    hub.add("model", "me/robot", {"README.md": b"---\nlibrary_name: lerobot\n---\n"})
    not_taken("me/robot", "repository_library_mismatch", "lerobot", "transformers", public=True)
    not_taken("somebody-else/model", "hub_access_denied", "HF_TOKEN")
    hub.faults.append((r"^GET /api/models/me/fails$", 500))
    not_taken("me/fails", "hub_failed", 500)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    not_taken("me/strange", "hub_access_denied", "HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    hub.asked.clear()
    not_taken("me/mine", "hub_token_missing", "HF_TOKEN")
    assert hub.asked == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    not_taken("me/mine", "upload_failed", "me/mine")
