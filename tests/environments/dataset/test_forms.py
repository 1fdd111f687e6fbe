"""A table gives the same tasks, grades and demonstrations in every file format."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.episodes import Task
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.environment import DatasetEnvironment
from armature.components.environments.dataset.huggingface import saved_shards
from armature.components.environments.dataset.shards import open_csv, open_parquet
from armature.components.environments.make import environment_sources
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_environment, load_tasks
from armature.components.models.load import load_processor
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.rl.settings import TrainVLMSettings
from armature.components.vlm.sft.demonstrate import PromptWriter, demonstrate, expert
from tests.builders import make_machine
from tests.hub_server import HubServer
from tests.refusals import refused
from tests.vlm.conftest import model_settings

from .tables import (
    ANSWERS,
    FORMS,
    args_of,
    bars,
    data_url,
    environment_of,
    rows_of,
    write_csv,
    write_images,
    write_jsonl,
)

COUNT = 40
EMBEDDED = ("parquet with images", "saved by datasets")


def written(folder: Path, form: str, count: int = COUNT) -> dict[str, Any]:
    rows = rows_of(count)
    write_images(folder, rows)
    return FORMS[form](folder, rows)


def shown(environment: DatasetEnvironment, task: Task) -> tuple[str | bytes, ...]:
    episode = environment.episode(task)
    content = asyncio.run(episode.reset()).content
    return tuple(part if isinstance(part, str) else part.data for part in content)


def worth(environment: DatasetEnvironment, task: Task, answer: str) -> float:
    outcome = asyncio.run(environment.episode(task).step(answer))
    assert outcome.done
    return sum(environment.reward_weights[name] * value for name, value in outcome.reward_parts.items())


def number_of(content: tuple[str | bytes, ...]) -> int:
    return int(str(content[1]).split("chart ")[1].split(" ")[0])


@pytest.mark.parametrize("form", sorted(FORMS))
def test_all_formats_give_equal_tasks_and_observations(form: str, tmp_path: Path) -> None:
    if form == "saved by datasets":
        pytest.importorskip("datasets")
    embedded = form in EMBEDDED  # digests cover the bytes of embedded images, and the paths of files
    plain = environment_of(written(tmp_path / "plain", "parquet with images" if embedded else "jsonl"), seed=3)
    other = environment_of(written(tmp_path / "other", form), seed=3)
    for split in ("train", "heldout"):
        expected, tasks = list(plain.tasks(split)), list(other.tasks(split))  # type: ignore[arg-type]
        essence = [
            [(task.task_id, task.split, task.payload["digest"], task.payload["kind"]) for task in each]
            for each in (expected, tasks)
        ]
        assert essence[0] == essence[1] and 0 < len(tasks) < COUNT
        for task, same in zip(tasks, expected, strict=True):
            content = shown(other, task)
            number = number_of(content)
            row = rows_of(COUNT)[number]
            assert content == (bars(number), row["question"]) == shown(plain, same)
            assert task.payload["kind"] == row["kind"]
            assert other.demonstration(task) == [row["answer"]]
            assert worth(other, task, row["answer"]) == 1.0 and worth(other, task, "none of them") == 0.0


def test_class_folders_become_labeled_rows(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / f"{'train' if number % 4 else 'test'}/{['cat', 'dog'][number % 2]}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(bars(number))
    split = {"by": "name", "train": "train", "heldout": ["test"]}
    environment = environment_of(
        {"source": str(tmp_path)}, prompt="Which animal?", answer="label", kind="label", split=split
    )
    train, heldout = list(environment.tasks("train")), list(environment.tasks("heldout"))
    assert (len(train), len(heldout)) == (15, 5)
    for task in train + heldout:
        image, text = shown(environment, task)
        number = next(each for each in range(20) if bars(each) == image)
        assert text == "Which animal?" and environment.demonstration(task) == [["cat", "dog"][number % 2]]
        assert task.split == ("train" if number % 4 else "heldout")


def test_image_missing_in_metadata_is_a_bad_row(tmp_path: Path) -> None:
    where = written(tmp_path, "folder of images with metadata")
    (tmp_path / "images/extra.png").write_bytes(bars(1))
    with refused("rows_unusable", "1 of 41", "1 no_metadata"):
        list(environment_of(where).tasks("train"))


@pytest.mark.parametrize("form", ["bytes", "base64", "data URL", "struct of base64", "list"])
def test_reads_images_in_all_encodings(form: str, tmp_path: Path) -> None:
    data = [bars(number) for number in range(COUNT)]
    text = [base64.b64encode(each).decode() for each in data]
    forms: dict[str, list[Any]] = {
        "bytes": list(data),
        "base64": list(text),
        "data URL": [data_url(each) for each in data],
        "struct of base64": [{"bytes": each} for each in text],
        "list": [[{"bytes": each, "path": None}] for each in data],
    }
    rows = [{**row, "image": image} for row, image in zip(rows_of(COUNT), forms[form], strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    environment = environment_of({"source": str(tmp_path / "rows.parquet")})
    for task in environment.tasks("train"):
        content = shown(environment, task)
        assert content[0] == bars(number_of(content))


def test_class_labels_become_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    labels = datasets.ClassLabel(names=["left", "middle", "right"])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    rows = [{"image": {"bytes": bars(n), "path": None}, "label": n % 3} for n in range(12)]
    dataset = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows[start::2], features=features) for start, name in enumerate("ab")}
    )
    dataset.save_to_disk(str(tmp_path / "saved"))
    where, columns = {"source": str(tmp_path / "saved")}, {"prompt": "Which?", "answer": "label", "kind": ""}
    with refused("split_not_chosen", "a, b"):
        list(environment_of(where, **columns).tasks("train"))
    split = {"by": "name", "train": "a", "heldout": "b"}
    environment = environment_of(where, split=split, **columns)
    for name, start in (("train", 0), ("heldout", 1)):
        answers = {
            (shown(environment, task)[0], *environment.demonstration(task))
            for task in environment.tasks(name)  # type: ignore[arg-type]
        }
        assert answers == {(bars(n), ["left", "middle", "right"][n % 3]) for n in range(start, 12, 2)}


def test_class_labels_in_lists_and_structs_become_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["left", "right"])
    table = pa.table({"q": ["0", "1", "2"], "a": [[0, 1], [1], [5]], "s": [{"x": 0}, None, {"x": 0}]})
    features = {"q": datasets.Value("string"), "a": datasets.List(label), "s": {"x": label}}
    info = datasets.DatasetInfo(features=datasets.Features(features))
    datasets.Dataset(table, info=info).save_to_disk(str(tmp_path / "saved"))
    (shard,) = saved_shards(tmp_path / "saved")
    first, second, third = shard.scan({"a", "s"})
    assert first == {"a": ["left", "right"], "s": {"x": "left"}} and second == {"a": ["right"], "s": None}
    assert isinstance(third, BadRow) and third.reason == "unreadable"


def test_reads_row_groups_with_different_dictionaries(tmp_path: Path) -> None:
    """A writer that appends tables with categories gives each row group its own dictionary."""
    tables = [pa.table({"a": pa.array([f"{group}-{n % 7}" for n in range(300)]).dictionary_encode()}) for group in "xy"]
    with pq.ParquetWriter(tmp_path / "rows.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    rows = open_parquet(tmp_path / "rows.parquet", "rows")
    assert list(rows.scan({"a"})) == [{"a": f"{group}-{n % 7}"} for group in "xy" for n in range(300)]
    assert rows.row(599) == {"a": "y-5"}


@pytest.mark.parametrize("suffix", ["tsv", "TSV"])
def test_tsv_columns_are_separated_by_tabs(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"rows.{suffix}").write_text("a\tb\n1\tx,y\n")
    assert list(open_csv(tmp_path / f"rows.{suffix}", "rows").scan({"a", "b"})) == [{"a": 1, "b": "x,y"}]


def test_hub_parquet_files_equal_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read Parquet files with several images per row and image tokens, with our reader and the library datasets."""
    datasets = pytest.importorskip("datasets")
    from armature.components.environments.dataset.huggingface import hub_shards

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    for name, count in (("train", 5), ("test", 3)):
        rows = [
            {
                "images": [{"bytes": bars(number + each), "path": None} for each in range(2)],
                "problem": f"<image>or <image>is {number}?",
                "answer": ANSWERS[number % 3],
            }
            for number in range(count)
        ]
        dataset = datasets.Dataset.from_list(rows, features=features)
        dataset.to_parquet(str(tmp_path / f"hub/data/{name}-00000-of-00001.parquet"))
    loaded = {shard.name: shard for shard in hub_shards(str(tmp_path / "hub"), "0" * 40, "")}
    environment = environment_of(
        {"source": str(tmp_path / "hub/data")},
        prompt="{problem}",
        images="images",
        image_token="<image>",
        kind="",
        split={"by": "name", "train": "train-*", "heldout": "test-*"},
    )
    for split, name in (("train", "train"), ("heldout", "test")):
        tasks = list(environment.tasks(split))  # type: ignore[arg-type]
        assert len(tasks) == len(list(loaded[name].scan({"problem"}))) == (5 if name == "train" else 3)
        for task in tasks:
            number = task.payload["row"]
            assert shown(environment, task) == (bars(number), "or ", bars(number + 1), f"is {number}?")
            assert loaded[name].row(number) == environment._shards[task.payload["file"]].row(number)
            assert environment.demonstration(task) == [ANSWERS[number % 3]]


def test_tasks_stage_writes_tasks_preview_and_drop_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(COUNT)
    write_images(tmp_path, rows)
    rows[3]["answer"] = None
    (tmp_path / rows[5]["image"]).unlink()
    (tmp_path / rows[7]["image"]).write_bytes(bars(7)[:40])
    filters = [{"column": "id", "operator": ">=", "value": 2}]
    where = {**FORMS["jsonl"](tmp_path, rows), "on_bad_row": "skip", "filters": filters}
    settings = EnvironmentSettings(name="dataset", args=args_of(where))
    artifact = run_stage("tasks", settings, {}, make_machine(store=tmp_path / "store"))
    assert "tasks: rows left out: 1 bad_image, 2 filtered, 1 no_answer, 1 no_image" in capsys.readouterr().out
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    assert manifest["drops"] == {"no_answer": 1, "no_image": 1, "bad_image": 1, "filtered": 2}
    listed = [*load_tasks(artifact.path, "train"), *load_tasks(artifact.path, "heldout")]
    assert len(listed) == COUNT - 5 == sum(manifest["rows"].values())
    assert {task.payload["row"] for task in listed} == set(range(2, COUNT)) - {3, 5, 7}
    environment = load_environment(artifact.path)
    assert isinstance(environment, DatasetEnvironment)
    assert all(number_of(shown(environment, task)) == task.payload["row"] for task in listed)
    assert (artifact.path / "preview.png").is_file()


def test_task_counts_are_upper_limits(tmp_path: Path) -> None:
    where = written(tmp_path, "csv")
    every = environment_of(where, seed=1)
    few = environment_of(where, seed=1, train_tasks=5, heldout_tasks=10**6)
    assert list(few.tasks("train")) == list(every.tasks("train"))[:5]
    assert list(few.tasks("heldout")) == list(every.tasks("heldout"))


def test_changed_row_raises_row_changed(tmp_path: Path) -> None:
    where = written(tmp_path, "jsonl")
    (task, *_) = environment_of(where).tasks("train")
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace("the highest", "the lowest "))
    with refused("row_changed", task.task_id):
        environment_of(where).episode(task)


def test_sources_depend_on_data_and_images_not_on_location(tmp_path: Path) -> None:
    def sources(folder: Path, form: str = "jsonl") -> dict[str, str]:
        args = args_of({"source": str(folder / f"rows.{form}")})
        return environment_sources(EnvironmentSettings(name="dataset", args=args))

    written(tmp_path / "one", "jsonl")
    first = sources(tmp_path / "one")
    written(tmp_path / "copy", "jsonl")
    (tmp_path / "copy/unrelated.png").write_bytes(bars(0))
    assert sources(tmp_path / "copy") == first
    for change in (
        lambda: (tmp_path / "copy/images/007.png").write_bytes(bars(8)),
        lambda: (tmp_path / "copy/images/007.png").unlink(),
        lambda: write_jsonl(tmp_path / "copy/rows.jsonl", rows_of(COUNT - 1)),
    ):
        change()
        changed = sources(tmp_path / "copy")
        assert changed != first
        first = changed


def test_sources_cover_linked_tables_and_new_class_images(tmp_path: Path) -> None:
    """A table may be a link out of its folder, such as in the folder of a download cache."""
    written(tmp_path / "data", "jsonl")
    (tmp_path / "data/rows.jsonl").rename(tmp_path / "blob")
    (tmp_path / "data/rows.jsonl").symlink_to(tmp_path / "blob")
    (tmp_path / "classes/cat").mkdir(parents=True)
    (tmp_path / "classes/cat/0.png").write_bytes(bars(0))
    where = {"source": str(tmp_path / "data/rows.jsonl")}
    assert len(list(environment_of(where).tasks("train"))) > 0
    classes = args_of({"source": str(tmp_path / "classes")}, prompt="Which?", answer="label", kind="")
    chosen = [EnvironmentSettings(name="dataset", args=args) for args in (args_of(where), classes)]
    before = [environment_sources(settings) for settings in chosen]
    write_jsonl(tmp_path / "blob", rows_of(COUNT - 1))
    (tmp_path / "classes/cat/1.png").write_bytes(bars(1))
    assert all(environment_sources(settings) != first for settings, first in zip(chosen, before, strict=True))


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        pytest.param({"source": "nowhere/rows.jsonl"}, "data_folder_missing", "nowhere", id="absent"),
        pytest.param({"source": "owner/name"}, "revision_missing", "owner/name", id="hub name"),
        pytest.param({"answer": "anwser"}, "unknown_column", "'answer'", id="column"),
        pytest.param({"prompt": "{image}{qestion}"}, "unknown_column", "'question'", id="column of the prompt"),
        pytest.param({"source": "s3://bucket/rows.jsonl"}, "url_not_supported", "s3:", id="S3 without its package"),
        pytest.param({"revision": "main"}, "revision_unused", "rows.jsonl", id="revision of a file"),
    ],
)
def test_rejects_unusable_sources(
    changes: dict[str, Any], code: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = written(tmp_path, "jsonl") | changes
    with refused(code, value):
        list(environment_of(where, **changes).tasks("train"))


def test_csv_numbers_keep_their_written_form(tmp_path: Path) -> None:
    rows = [{"a": "007", "b": "7", "c": "0.5", "d": "1.50", "e": "" if n else "3", "answer": f"{n}"} for n in range(30)]
    write_csv(tmp_path / "rows.csv", rows)
    split = {"by": "hash", "heldout": 0.3, "group": "answer"}
    environment = environment_of(
        {"source": str(tmp_path / "rows.csv")}, prompt="{a} {b} {c} {d}", images=[], kind="", split=split
    )
    (task, *_) = environment.tasks("train")
    assert shown(environment, task) == ("007 7 0.5 1.50",)
    with refused("rows_unusable", "29 no_text"):
        list(environment_of({"source": str(tmp_path / "rows.csv")}, prompt="{e}", images=[], kind="").tasks("train"))


def test_hub_branch_is_resolved_to_a_commit_once(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks, training and evaluation use the branch's commit at the time when the tasks were made."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    first = hub.add("dataset", "someone/bars", {"train.jsonl": lines(12), "test.jsonl": lines(4)})
    values = args_of({"source": "someone/bars"}, revision="main", images=[], kind="", prompt="{question}")
    values["split"] = {"by": "name"}
    settings, machine = EnvironmentSettings(name="dataset", args=values), make_machine(store=tmp_path / "store")
    tasks = run_stage("tasks", settings, {}, machine)
    assert f"someone/bars: main is commit {first}\n" in capsys.readouterr().out
    assert len([request for request in hub.asked if request.endswith("bars/revision/main")]) == 1
    assert len(load_tasks(tasks.path, "train")) == 12
    second = hub.add("dataset", "someone/bars", {"train.jsonl": lines(15), "test.jsonl": lines(4)})
    assert len(list(load_environment(tasks.path).tasks("train"))) == 12
    training = (
        load_recipe("train-vlm/colors").settings_for(TrainVLMSettings).model_copy(update={"environment": settings})
    )
    played = STAGES["train-vlm"].resolve(training, {"tasks": tasks}, print)
    assert played.environment.args["revision"] == first != second
    moved = run_stage("tasks", settings, {}, machine)
    assert moved != tasks and len(load_tasks(moved.path, "train")) == 15


def lines(count: int) -> bytes:
    return "".join(
        json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in rows_of(count)
    ).encode()


@pytest.mark.parametrize("form", ["prompt", "conversation"])
def test_demonstration_follows_the_row_prompt(form: str, tmp_path: Path) -> None:
    rows = rows_of(6)
    write_images(tmp_path, rows)
    for row in rows:
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}
        unsure = [{"role": "assistant", "content": "Again?"}, {"role": "user", "content": "Yes."}]
        row["chat"] = [{"role": "system", "content": "Be brief."}, asked, *unsure]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    how = {"prompt": "", "conversation": "chat"} if form == "conversation" else {"system": "Be brief."}
    environment = environment_of({"source": str(tmp_path / "rows.jsonl")}, split={"by": "column"}, **how)
    tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
    model = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", 0)
    processor = load_processor(model, model_settings())
    images = ImageStore(tmp_path / "images-of-rollouts")
    writer, machine = PromptWriter(processor), make_machine(max_concurrent=2)
    outputs = asyncio.run(demonstrate(expert(environment), tasks, 1.0, writer, images, machine, lambda done: None))
    assert outputs.failures == () and len(outputs.trajectories) == 6
    for task, trajectory in zip(tasks, outputs.trajectories, strict=True):
        row = rows[task.payload["row"]]
        (turn,) = trajectory.turns
        prompt = processor.tokenizer.decode(turn.prompt_token_ids, skip_special_tokens=True)
        later = ["assistant", "Again?", "user", "Yes."] if form == "conversation" else []
        assert prompt.split("\n") == ["system", "Be brief.", "user", row["question"], *later, "assistant", ""]
        assert turn.completion == row["answer"] and turn.reward == 1.0
        assert images.read(turn.images[0]) == (tmp_path / row["image"]).read_bytes()
        roles = [message["role"] for message in json.loads(turn.messages)]
        assert roles == ["system", "user", *(["assistant", "user"] if later else [])]
