"""`MultimodalGRPOTrainer` with rows and reward functions of a program; a transformers model samples."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from armature.components.artifacts.json_lines import History
from armature.components.contracts.errors import ArmatureError, RolloutFailed
from armature.components.environments.dataset.python_rows import write_rows
from armature.components.rewards.callables import CallableReward
from armature.components.rewards.reward import RewardInput
from armature.components.rl.config import MultimodalRLConfig
from armature.components.rl.trainer import MultimodalGRPOTrainer
from tests.refusals import refused
from tests.rl.test_trainer import LocalSampler, config, run, samplers
from tests.vlm.conftest import Tiny, make_tiny, tiny

__all__ = ["make_tiny", "samplers", "tiny"]  # fixtures

PIXELS = [np.full((28, 28, 3), 40 * number, np.uint8) for number in range(6)]
IMAGES = [Image.fromarray(each) for each in PIXELS]
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]

ADAPTER = SimpleNamespace(build_batch=None)

TWO: dict[str, Any] = {"a": [], "b": []}
"""Two datasets without rows."""


def rows(**more: Any) -> list[dict[str, Any]]:
    """Return six rows with images, as a user would write them."""
    return [
        {"prompt": f"Which color is {number}?", "image": image, "answer": str(number)} | more
        for number, image in enumerate(IMAGES)
    ]


def small(folder: Path, **options: Any) -> MultimodalRLConfig:
    """Return options with two groups per step. The number of steps is not set."""
    values = config(folder, eval_temperature=1.0).model_dump(exclude_defaults=True, exclude={"max_steps"})
    return MultimodalRLConfig(**(values | options))


def letters(completion: str) -> float:
    return float(completion.count("e"))


def trl_length(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    assert len(completions) == len(answer) == 1 and "image" not in columns
    return [float(len(completions[0]))]


# --- Training ---


def test_rows_and_functions_train_for_one_pass(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    trainer = MultimodalGRPOTrainer(
        str(tiny.folder),
        config=small(tmp_path),
        reward_funcs=[letters, trl_length],
        reward_weights=[1.0, 0.5],
        train_dataset=rows(),
        eval_dataset=rows()[:2],
    )
    assert not list(tmp_path.iterdir())  # the constructor writes nothing
    result = trainer.train()
    assert [row["step"] for row in result.history] == [0, 1, 2, 3]  # 6 rows in groups of 4, 2 groups a step
    assert {"heldout/accuracy"} <= result.history[0].keys() and result.history[0].keys().isdisjoint({"loss"})
    best = result.best["best/step"]
    assert result["heldout/accuracy"] == next(row for row in result.history if row["step"] == best)["heldout/accuracy"]
    assert (result.final / "config.json").exists() and samplers[0].synced[-1] == 3
    assert (trainer.save_model(tmp_path / "saved") / "config.json").exists()
    manifests = (tmp_path / "store/rollouts").glob("*/manifest.json")
    inputs = [json.loads(path.read_text())["inputs"] for path in manifests]
    assert len(inputs) == 3 and all("reward letters source only" in each for each in inputs)


def test_several_datasets_train_by_weight_with_metrics_of_each(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]
) -> None:
    words = [{"prompt": f"Say {number}", "answer": str(number)} for number in range(2)]  # without images
    trainer = MultimodalGRPOTrainer(
        str(tiny.folder),
        config=small(tmp_path),
        reward_funcs=letters,
        train_dataset={"shown": rows(), "words": words},
        eval_dataset={"shown": rows(answer="7")[:2], "words": [{"prompt": "Say 2", "answer": "2"}]},
        dataset_weights={"shown": 3, "words": 1},
    )
    history = trainer.train().history
    assert [row["step"] for row in history] == [0, 1, 2, 3, 4]  # 6 and 2 tasks in groups of 4, 2 groups a step
    assert {"heldout_accuracy_of/shown", "heldout_accuracy_of/words"} <= history[0].keys()
    totals = {name: sum(row.get(f"rollouts_of/{name}", 0.0) for row in history) for name in ("shown", "words")}
    assert sum(totals.values()) == 32.0 and totals["shown"] > totals["words"] > 0.0
    for row in history[1:]:
        parts = [
            (row[f"reward_of/{name}"], row[f"rollouts_of/{name}"]) for name in totals if f"reward_of/{name}" in row
        ]
        assert sum(mean * count for mean, count in parts) / 8 == pytest.approx(row["reward"])


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.long)])
def test_two_ranks_train_like_one(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], lora: dict[str, int] | None
) -> None:
    made: dict[int, MultimodalGRPOTrainer] = {}
    for processes in (1, 2):
        options = small(tmp_path / str(processes), processes=processes, max_steps=2, lora=lora)
        made[processes] = MultimodalGRPOTrainer(
            str(tiny.folder), config=options, reward_funcs=letters, train_dataset=rows()
        )
        made[processes].train()
    assert made[2].model is None and made[1].model is not None
    one, two = run(tmp_path / "1"), run(tmp_path / "2")
    for name in ("reward", "grad_norm", "mismatch_kl"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-3, abs=1e-6)
    assert one[1]["grad_norm"] > 0
    weights = [load_file(tmp_path / f"{number}/final/model.safetensors") for number in (1, 2)]
    before = load_file(tiny.folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name].float(), weights[0][name].float())}
    assert changed and (lora is None or all("_proj" in name for name in changed))
    for name in before:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)


def test_activations_are_recomputed_where_memory_is_short(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, MultimodalGRPOTrainer] = {}
    for room in (2**40, 1):
        monkeypatch.setattr("armature.components.rl.trainer.memory_of_rank", lambda *_, room=room: room)
        made[room] = MultimodalGRPOTrainer(
            str(tiny.folder),
            config=small(tmp_path / str(room), max_steps=1, bf16=True),
            reward_funcs=letters,
            train_dataset=rows(),
        )
        made[room].train()
    assert [each.model.is_gradient_checkpointing for each in made.values()] == [False, True]
    kept, recomputed = (run(tmp_path / str(room))[0]["grad_norm"] for room in made)
    assert kept == pytest.approx(recomputed, rel=1e-3)
    published = load_file(tmp_path / "1/final/model.safetensors")
    assert {each.dtype for each in published.values()} == {torch.bfloat16}  # as it was loaded


def test_full_gpu_memory_is_an_error_that_says_what_to_do(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB")

    monkeypatch.setattr("armature.components.vlm.learner._forward", full)
    options = small(tmp_path, max_steps=1)
    trainer = MultimodalGRPOTrainer(
        str(tiny.folder), config=options, reward_funcs=letters, train_dataset=rows(), eval_dataset=rows()[:1]
    )
    with refused("out_of_memory", "594.00 MiB"):
        trainer.train()


def test_interrupted_training_resumes_with_equal_rows(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    for folder, ends in ((tmp_path / "straight", [2]), (tmp_path / "stopped", [1, 2])):
        for max_steps in ends:
            options = small(folder, max_steps=max_steps, save_steps=1)
            MultimodalGRPOTrainer(str(tiny.folder), config=options, reward_funcs=letters, train_dataset=rows()).train()
    one, other = (History(tmp_path / name / "history.jsonl").read() for name in ("straight", "stopped"))
    compared = ("reward", "grad_norm", "mismatch_kl", "policy_version/max")
    assert [[row[name] for name in compared] for row in one] == [[row[name] for name in compared] for row in other]
    assert len(one) == 2 and one[1]["grad_norm"] > 0


class Recorder:
    """Callbacks that record their calls and stop after step 2."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return partial(self.called, name)

    def called(self, name: str, options: Any, state: Any, control: Any, **values: Any) -> None:
        self.calls.append((name, state.global_step))
        if name == "on_step_end":
            control.should_training_stop = state.global_step == 2
        if name == "on_log":
            assert state.log_history[-1] == {**values["logs"], "step": state.global_step}


def test_callback_sees_steps_and_ends_the_training(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    recorder = Recorder()
    MultimodalGRPOTrainer(
        str(tiny.folder),
        config=small(tmp_path, max_steps=5, save_steps=1),
        reward_funcs=letters,
        train_dataset=rows(),
        callbacks=[recorder],
    ).train()
    step = ["on_step_end", "on_log", "on_save"]
    expected = [("on_train_begin", 0), *((name, number) for number in (1, 2) for name in step), ("on_train_end", 2)]
    assert recorder.calls == expected and [row["step"] for row in run(tmp_path)] == [1, 2]


class Begun:
    """Callbacks given as a class, which the trainer instantiates."""

    steps: ClassVar[list[int]] = []

    def on_train_begin(self, options: Any, state: Any, control: Any) -> None:
        self.steps.append(state.max_steps)


def test_hub_model_trains_for_one_pass_without_heldout_rows(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("armature.components.rl.trainer.commit_of", lambda *_: "0" * 40)
    monkeypatch.setattr("armature.components.models.source.fetch_files", lambda *_, **__: tiny.folder)
    monkeypatch.setattr("armature.components.models.reserved_tokens._tokenizer_folder", lambda _: tiny.folder)
    options: Any = {"reward_funcs": letters, "train_dataset": rows(), "eval_fraction": 0.5, "report_to": None}
    trainer = MultimodalGRPOTrainer("owner/model", config=small(tmp_path), callbacks=Begun, **options)
    steps = [row["step"] for row in trainer.train().history]
    assert Begun.steps == [2] and steps == [0, 1, 2]  # half of 6 rows is trained on, in steps of 2 groups


@pytest.mark.parametrize(
    "change",
    [
        {"train_dataset": rows()[:5]},
        {"train_dataset": rows(more=1)},
        {"reward_funcs": lambda completion: float(len(completion))},
        {"reward_weights": [2.0]},
    ],
    ids=["fewer rows", "other rows", "other reward", "other weight"],
)
def test_training_does_not_resume_with_other_rows_or_rewards(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], change: dict[str, Any]
) -> None:
    options: Any = {"config": small(tmp_path, max_steps=1), "reward_funcs": letters, "train_dataset": rows()}
    MultimodalGRPOTrainer(str(tiny.folder), **options).train()
    with refused("resumes_other_data", tmp_path):
        MultimodalGRPOTrainer(str(tiny.folder), **(options | change)).train()
    MultimodalGRPOTrainer(str(tiny.folder), **options).train()


def test_metrics_of_every_step_reach_the_tracker(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = MultimodalGRPOTrainer(
        str(tiny.folder), config=small(tmp_path), reward_funcs=letters, train_dataset=rows(), report_to="tensorboard"
    )
    history = trainer.train().history
    (folder,) = (path.parent for path in (tmp_path / "trackers").rglob("events.out.*"))
    events = accumulator.EventAccumulator(str(folder)).Reload()
    for name in ("loss", "reward", "grad_norm"):
        points = [(point.step, point.value) for point in events.Scalars(name)]
        assert points == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in history]


@pytest.mark.parametrize(
    ("code", "shown", "options"),
    [
        ("config_missing", (), {}),
        ("config_missing", ("dict",), {"train_dataset": rows(), "reward_funcs": letters, "config": {"max_steps": 1}}),
        ("model_wrong_type", ("NoneType",), {"model": None}),
        ("processor_missing", ("Linear",), {"model": nn.Linear(1, 1)}),
        ("server_not_url", ("Auto",), {"train_dataset": rows(), "reward_funcs": letters, "server": "Auto"}),
        ("dataset_missing", (), {"prompt": "Which?", "config": MultimodalRLConfig()}),
        (
            "tasks_twice",
            ("env_id",),
            {"train_dataset": rows(), "reward_funcs": letters, "config": MultimodalRLConfig(env_id="colors")},
        ),
        *(
            ("number_out_of_bounds", (shown,), {"train_dataset": rows(), "reward_funcs": letters, name: value})
            for name, value, shown in (
                ("eval_fraction", 1, "1"),
                ("eval_fraction", "0.1", "0.1"),
                ("reward_weights", [float("nan")], "nan"),
            )
        ),
        ("dataset_missing", (), {"reward_funcs": letters}),
        ("unknown_tracker", ("wandbb",), {"train_dataset": rows(), "reward_funcs": letters, "report_to": "wandbb"}),
        ("reward_missing", ("0 rewards",), {"train_dataset": rows()}),
        ("unknown_argument", ("'args'", "config="), {"args": 1}),
        ("unknown_argument", ("rollouts_per_example",), {"num_generations": 8}),
        ("unknown_argument", ("'lr'",), {"lr": 1e-3}),
        (
            "lora_of_object",
            ("Linear",),
            {"model": nn.Linear(1, 1), "tokenizer": 1, "config": MultimodalRLConfig(lora={"rank": 2})},
        ),
        (
            "ranks_need_model_name",
            ("adapter", "SimpleNamespace"),
            {"adapter": ADAPTER, "config": MultimodalRLConfig(processes=2)},
        ),
        ("datasets_do_not_fit", ("'train'",), {"train_dataset": {"train": rows()}, "reward_funcs": letters}),
        (
            "datasets_do_not_fit",
            ("'c'",),
            {"train_dataset": TWO, "dataset_weights": {"a": 1, "c": 1}, "reward_funcs": letters},
        ),
        ("datasets_do_not_fit", ("'a'", "'b'"), {"train_dataset": TWO, "eval_dataset": [], "reward_funcs": letters}),
        ("datasets_do_not_fit", (), {"train_dataset": [], "dataset_weights": {"a": 1}, "reward_funcs": letters}),
        ("dataset_name_invalid", ("a/b",), {"train_dataset": {"a/b": [], "c": []}, "reward_funcs": letters}),
        (
            "number_out_of_bounds",
            ("dataset_weights",),
            {"train_dataset": TWO, "dataset_weights": {"a": 1, "b": 0}, "reward_funcs": letters},
        ),
        (
            "reward_missing",
            ("2 weights",),
            {"train_dataset": rows(), "reward_funcs": letters, "reward_weights": [1, 2]},
        ),
        (
            "heldout_rows_twice",
            (),
            {"train_dataset": rows(), "eval_dataset": rows(), "eval_fraction": 0.5, "reward_funcs": letters},
        ),
    ],
)
def test_rejects_arguments_that_do_not_fit(code: str, shown: tuple[str, ...], options: dict[str, Any]) -> None:
    with refused(code, *shown):
        MultimodalGRPOTrainer(**({"model": "no-such-model"} | options))


@pytest.mark.parametrize(
    ("code", "shown", "options"),
    [
        ("unknown_name", ("'exact_match'",), {"reward_funcs": "exact_mach"}),
        ("value_error", ("at_least",), {"reward_funcs": "length"}),
        ("module_code_missing", ("nowhere",), {"reward_funcs": "nowhere:reward"}),
        ("not_a_function", ("3",), {"reward_funcs": 3}),
        ("unknown_reward_argument", ("colour",), {"reward_funcs": lambda completions, colour: [0.0]}),
        ("completion_not_taken", ("both",), {"reward_funcs": lambda completion, completions: 0.0}),
        ("completion_not_taken", ("neither",), {"reward_funcs": lambda text: 0.0}),
        ("completion_not_taken", ("neither",), {"train_dataset": "a/b", "reward_funcs": lambda text: 0.0}),
        ("duplicate_reward", ("letters",), {"reward_funcs": [letters, partial(letters)]}),
        ("unknown_reward_part", ("letters",), {"config": MultimodalRLConfig(primary_reward_key="letter")}),
        ("rows_missing", ("train_dataset",), {"train_dataset": []}),
        ("rows_missing", ("train_dataset",), {"train_dataset": pd.DataFrame(columns=["prompt"])}),
        ("rows_missing", ("eval_dataset",), {"eval_dataset": datasets.Dataset.from_dict({"prompt": []})}),
        ("prompt_missing", ("question",), {"train_dataset": [{"question": "Which?"}]}),
        ("prompt_missing", ("question",), {"train_dataset": pa.Table.from_pylist([{"question": "Which?"}])}),
        ("unknown_column", ("'question'", "train_dataset"), {"prompt": "{question}"}),
        ("unknown_column", ("'prompt'", "eval_dataset"), {"eval_dataset": [{"question": "Which?", "answer": "1"}]}),
        ("value_error", ("prompt",), {"prompt": "{"}),
        ("image_column_unknown", ("photo",), {"train_dataset": [{"prompt": "Which?", "photo": IMAGES[0]}]}),
        ("image_column_unknown", ("photo",), {"train_dataset": pd.DataFrame({"prompt": ["?"], "photo": IMAGES[:1]})}),
        ("column_repeated", ("prompt",), {"train_dataset": pd.DataFrame([["a", "b"]], columns=["prompt"] * 2)}),
        ("columns_not_datasets", ("'answer'",), {"train_dataset": {"prompt": ["a"], "answer": ["b"]}}),
        ("columns_not_datasets", ("'answer'",), {"train_dataset": {"prompt": "a", "answer": "b"}}),
        ("rows_wrong_type", ("str",), {"train_dataset": [*rows(), "a text"]}),
        ("rows_wrong_type", ("int",), {"train_dataset": 3}),
        ("rows_wrong_type", ("DatasetDict",), {"train_dataset": datasets.DatasetDict()}),
        (
            "answer_missing",
            ("'exact_match'",),
            {"reward_funcs": "exact_match", "train_dataset": [{"prompt": "Which?"}]},
        ),
        *(("data_file_missing", (name,), {"train_dataset": name}) for name in ("none.jsonl", "none")),
        ("steps_unknown", (), {"train_dataset": iter(rows())}),
        ("callback_without_method", ("str",), {"callbacks": ["log"]}),
        ("checkpoint_folder_missing", ("no-such-model",), {}),
        ("not_a_checkpoint", (), {"model": "."}),
        ("unknown_name", ("'colors'",), {"train_dataset": None, "config": MultimodalRLConfig(env_id="colrs")}),
        ("adapter_wrong_type", ("MultimodalRLConfig",), {"adapter": MultimodalRLConfig()}),
        ("processor_missing", ("str",), {"tokenizer": "no-such-model"}),
    ],
)
def test_constructor_refuses_all_that_needs_no_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: str,
    shown: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"model": "no-such-model", "train_dataset": rows(), "reward_funcs": letters} | options
    if options["train_dataset"] is None:
        del options["reward_funcs"]
    with refused(code, *shown, kind=ArmatureError):
        MultimodalGRPOTrainer(**options)
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_tokenizer_is_no_processor(tiny: Tiny) -> None:
    for model in (tiny.model(), str(tiny.folder)):
        with refused("processor_missing", type(tiny.processor.tokenizer).__name__):
            MultimodalGRPOTrainer(model, tiny.processor.tokenizer, reward_funcs=letters, train_dataset=rows())


def test_option_of_trl_names_the_nearest_option() -> None:
    with refused("unknown_option", "rollouts_per_example"):
        MultimodalRLConfig(num_generations=8)


@pytest.mark.parametrize(
    ("code", "shown", "options"),
    [
        (
            "rows_unusable",
            ("no_image",),
            {"train_dataset": [*rows(), {"prompt": "Which?", "image": None, "answer": 1}]},
        ),
        (
            "rows_unusable",
            ("no_image",),
            {"train_dataset": [{"prompt": "Which?", "image": "missing.png", "answer": 1}]},
        ),
        ("rows_unusable", ("bad_image", "row 1"), {"train_dataset": [*rows()[:1], *rows(image=b"no image")[:1]]}),
        ("rows_unusable", ("wrong_type", "float32"), {"train_dataset": rows(image=np.zeros((28, 28, 3), np.float32))}),
        ("rows_unusable", ("bad_path",), {"train_dataset": rows(image="https://example.org/1.png")}),
        ("rows_unusable", ("reserved_token",), {"train_dataset": rows(prompt="<|image_pad|> Which?")}),
        ("rows_missing", ("train_dataset",), {"train_dataset": iter([])}),
        ("value_not_json", ("row 0",), {"train_dataset": rows(more=object())}),
    ],
)
def test_rejects_rows_before_anything_starts(
    tiny: Tiny, tmp_path: Path, code: str, shown: tuple[str, ...], options: dict[str, Any]
) -> None:
    values = {"train_dataset": rows(), "reward_funcs": letters} | options
    with refused(code, *shown):
        MultimodalGRPOTrainer(str(tiny.folder), config=small(tmp_path, max_steps=1), **values).train()


# --- Rows ---


def forms(folder: Path) -> dict[str, Any]:
    """Return the same six rows in each form that users may pass. Images are files in forms that cannot hold images."""
    for number, image in enumerate(IMAGES):
        image.save(folder / f"{number}.png")
    paths = [{**row, "image": str(folder / f"{number}.png")} for number, row in enumerate(rows())]
    coded = [
        {**row, "image": {"bytes": (folder / f"{n}.png").read_bytes(), "path": None}} for n, row in enumerate(rows())
    ]
    named = [{**row, "image": f"{number}.png"} for number, row in enumerate(rows())]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "image": datasets.Image(), "answer": datasets.Value("string")}
    )
    dataset = datasets.Dataset.from_list(rows(), features=features)
    return {
        "list": rows(),
        "path objects": [{**row, "image": Path(row["image"])} for row in paths],
        "arrays": [{**row, "image": pixels} for row, pixels in zip(rows(), PIXELS, strict=True)],
        "paths": paths,
        "frame": pd.DataFrame(rows()),
        "frame of paths": pd.DataFrame(paths),
        "arrow": pa.Table.from_pylist(coded),
        "dataset": dataset,
        "dataset of paths": datasets.Dataset.from_list(paths).cast_column("image", datasets.Image()),
        "iterable": dataset.to_iterable_dataset(),
        "generator": iter(rows()),
        "file": folder / "rows.jsonl",
    }


def test_all_forms_of_rows_are_written_equally(tmp_path: Path) -> None:
    written: dict[str, list[Any]] = {}
    for name, form in forms(tmp_path).items():
        made = write_rows(form, tmp_path / name, "train")
        assert (made.count, made.columns, made.most_images, made.chat) == (6, ("answer", "image", "prompt"), 1, False)
        lines = [json.loads(line) for line in (tmp_path / name / "train.jsonl").read_text().splitlines()]
        for row in lines:  # the same pixels; the bytes of files are kept, and others are encoded
            row["image"] = np.asarray(Image.open(tmp_path / name / row["image"])).tolist()
        written[name] = lines
    expected = [{**row, "image": pixels.tolist()} for row, pixels in zip(rows(), PIXELS, strict=True)]
    assert all(lines == expected for lines in written.values())


def test_labels_become_names_and_messages_keep_their_images(tmp_path: Path) -> None:
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "label": datasets.ClassLabel(names=["one", "two"])}
    )
    labels = datasets.Dataset.from_list([{"prompt": "Which?", "label": 1}], features=features)
    for form in (labels, labels.to_iterable_dataset()):
        write_rows(form, tmp_path, "train")
        assert json.loads((tmp_path / "train.jsonl").read_text()) == {"prompt": "Which?", "label": "two"}
    IMAGES[1].save(tmp_path / "1.png")
    path = str(tmp_path / "1.png")
    for part in (
        {"type": "image", "image": IMAGES[1]},
        {"type": "image", "path": path},
        {"type": "image_url", "image_url": {"url": path}},
    ):
        chat = [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]
        made = write_rows([{"prompt": chat}], tmp_path, "train")
        assert made.chat and made.most_images == 1
        (shown,) = re.findall("images/[0-9a-f]+", (tmp_path / "train.jsonl").read_text())
        assert np.array_equal(np.asarray(Image.open(tmp_path / shown)), PIXELS[1])


def test_array_of_images_and_narrow_numbers_are_written(tmp_path: Path) -> None:
    row = {"prompt": "Which?", "images": np.stack(PIXELS[:2]), "size": np.float32(0.1)}
    assert write_rows([row], tmp_path, "train").most_images == 2
    assert json.loads((tmp_path / "train.jsonl").read_text())["size"] == 0.1


# --- Reward functions ---


def grade(reward: CallableReward, completion: str = "red", **row: Any) -> Any:
    return asyncio.run(reward.grade(RewardInput(completion, answer=row.get("answer"), row=row)))


async def later(completion: str, answer: str) -> bool:
    await asyncio.sleep(0)
    return completion == answer


def test_kind_of_reward_function_is_recognized_by_its_arguments() -> None:
    columns = ["answer", "prompt", "size"]
    assert grade(CallableReward(later), answer="red") == {"later": 1.0}

    def listed(prompts: list[Any], completions: list[Any], size: list[int], **more: Any) -> list[float | None]:
        assert prompts == ["Which?"] and more == {"answer": ["red"]}
        return [len(completions[0]) * size[0] if size[0] else None]

    assert grade(CallableReward(listed, columns=columns), prompt="Which?", answer="red", size=2) == {"listed": 6.0}
    assert grade(CallableReward(listed, columns=columns), prompt="Which?", answer="red", size=0) == {}

    def of_messages(completions: list[list[dict[str, str]]]) -> list[float]:
        (message,) = completions[0]
        return [float(message == {"role": "assistant", "content": "red"})]

    assert grade(CallableReward(of_messages, chat=True), prompt=CHAT) == {"of_messages": 1.0}
    assert grade(CallableReward(partial(later, answer="red")), answer="blue") == {"later": 1.0}
    for numbers in (torch.tensor([2.0]), np.array([2.0]), [torch.tensor(2.0)]):  # as TRL accepts them
        assert grade(CallableReward(lambda completions, numbers=numbers: numbers)) == {"lambda": 2.0}


def raised(error: Exception) -> float:
    raise error


@pytest.mark.parametrize(
    ("reason", "function"),
    [
        ("reward_error", lambda completion: 1 / 0),
        ("reward_error", lambda completion: next(iter(()))),
        ("reward_error", lambda completion: raised(TimeoutError())),
        ("reward_invalid", lambda completion: "1"),
        ("reward_invalid", lambda completion: float("nan")),
        ("reward_invalid", lambda completions: 1.0),
        ("reward_invalid", lambda completions: [1.0, 2.0]),
    ],
)
def test_failing_function_fails_the_rollout(reason: str, function: Any) -> None:
    with pytest.raises(RolloutFailed) as failed:
        grade(CallableReward(function))
    assert failed.value.reason == reason


def test_slow_function_fails_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armature.components.rewards.callables.SECONDS", 0.05)

    async def slow(completion: str) -> float:
        await asyncio.sleep(5)
        return 1.0

    with pytest.raises(RolloutFailed) as failed:
        grade(CallableReward(slow))
    assert failed.value.reason == "reward_timeout"


def test_sources_change_with_the_text_of_a_function() -> None:
    named: dict[str, Any] = {}
    for number in (1, 2, 1):
        exec(f"def f(completion):\n    return {number}", scope := {})  # as in an interpreter: there is no source text
        named.setdefault(str(number), []).append(CallableReward(scope["f"]).sources["reward f source only"])
    assert named["1"][0] == named["1"][1] != named["2"][0]
    assert CallableReward(letters).sources != CallableReward(later).sources
    red, blue, same = (CallableReward(partial(later, answer=color)).sources for color in ("red", "blue", "red"))
    assert red == same != blue and red.keys() == {"reward later source only"}
