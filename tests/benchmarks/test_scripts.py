"""Every benchmark starts: it imports what exists, quick ones run at toy sizes, and large ones say that they need a GPU.

The halves that take longer run in tests/end_to_end/test_benchmarks.py, and those of other projects in tests/interop.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_case, table
from benchmarks.table import Row

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
FOREIGN = {
    "policy_lerobot": "lerobot/test_benchmarks.py",
    "rl_step_trl": "trl/test_trl.py",
    "sft_trl": "trl/test_conversations.py",
    "smolvla_lerobot": "lerobot/test_benchmarks.py",
    "step_trl": "trl/test_trl.py",
    "store_s3": "cluster/test_benchmarks.py",
    "sums_trl": "trl/test_trl.py",
    "trl_side": "trl/test_trl.py",
}
"""Scripts that need packages of another environment, and the tests in tests/interop that run them at toy size there."""

SIZES: dict[str, dict[str, Any]] = {
    "alfworld": {"GAMES": 1, "GROUP": 2, "STEPS": 2},
    "batches": {"GROUPS": 2, "GROUP_SIZE": 2, "SIDE": 56, "TOKENS": 8},
    "frames": {"SIDE": 32, "CHUNK": 2, "SAMPLES": 4},
    "large_dataset": {"SIZE": 2000, "VIDEO_FILES": 4, "WORKERS": 1},
    "processor": {"EXAMPLES": 2, "ROUNDS": 1},
    "quantiles": {"FRAMES": 1000, "EPISODES": 10, "WIDTH": 2, "BINS": 50, "PYTHON": Path("absent")},
    "scale": {"SIZES": (8, 16), "STEP_ROWS": 8, "ROUNDS": 1},
    "store": {"LARGE": 300, "SMALL": 200, "ROUNDS": 1, "_files": list},  # which goes to tests/interop/cluster
    "view": {"STEPS": 4, "GROUPS": 2, "SIZE": 2, "ROUNDS": 1, "TOKENS": 4},
}


def names_of(script: str) -> set[str]:
    """Return the names that a benchmark script defines at its top level. The script is parsed, not run."""
    names: set[str] = set()
    for node in ast.parse((BENCHMARKS / f"{script}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in FOREIGN])
def test_script_imports(script: str) -> None:
    import_module("benchmarks" if script == "__init__" else f"benchmarks.{script}")


@pytest.mark.parametrize("script", FOREIGN)
def test_peer_side_imports_existing_names(script: str) -> None:
    """Every name that a script imports from another benchmark script is defined there."""
    tree = ast.parse((BENCHMARKS / f"{script}.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    for node in imports:
        beside = (node.module or "").removeprefix("benchmarks.")
        if beside in SCRIPTS:
            assert {alias.name for alias in node.names} <= names_of(beside)


@pytest.mark.parametrize("script", FOREIGN)
def test_peer_side_is_run_by_a_test(script: str) -> None:
    """The test names the script, or a benchmark that starts it."""
    starts = [other for other in SCRIPTS if f'"{script}.py"' in (BENCHMARKS / f"{other}.py").read_text()]
    test = (BENCHMARKS.parent / "tests/interop" / FOREIGN[script]).read_text()
    assert any(re.search(rf"\b{name}\b", test) for name in (script, *starts))


def test_benchmark_page_shows_the_results() -> None:
    assert table.PAGE.read_text() == table.render(json.loads(table.RESULTS.read_text()))


@pytest.mark.parametrize("script", SIZES)
def test_benchmark_runs_at_toy_size(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"benchmarks.{script}")
    for name, value in SIZES[script].items():
        monkeypatch.setattr(module, name, value)
    rows: list[Row] = module.measure()
    assert rows and all(math.isfinite(row.ours) and row.baseline > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize(
    ("script", "function", "words"),
    [
        ("attention_gpu", "main", [["qwen2.5-vl"]]),
        ("delta_gpu", "main", [[]]),
        ("experts_gpu", "main", [[]]),
        ("families_gpu", "main", [["smolvlm"]]),
        ("logprobs_gpu", "record", []),
        ("memory_gpu", "main", [False]),
        ("scaling_gpu", "main", [["one", "A"]]),
        ("step_gpu", "record", []),
        ("sync_gpu", "main", []),
        ("vla_rl_gpu", "main", []),
    ],
)
def test_rejects_large_sizes_without_gpu(
    script: str, function: str, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [script, *(["3b"] if script == "sync_gpu" else [])])
    start: Callable[..., None] = getattr(import_module(f"benchmarks.{script}"), function)
    with pytest.raises(SystemExit) as refused:
        start(*words)
    assert "GPU" in str(refused.value)


class TestSteps:
    def taken(self, side: str, way: str, *seconds: float) -> dict[str, Any]:
        return {"side": side, "way": way, "seconds": list(seconds), "computed": 1, "peak_gib": 1.0, "norm": 1.0}

    def test_both_sides_of_a_row_treat_activations_alike(self) -> None:
        from benchmarks.step_gpu import rows_of

        taken = [
            self.taken("trl", "bf16,1,0,A,16,4", 4.0),
            self.taken("trl", "bf16,1,0,A,16,2", 5.0),
            self.taken("trl", "bf16,1,1,A,16,4", 9.0),
            self.taken("trl", "bf16,1,1,A,16,2", 8.0),
            self.taken("trl", "bf16,1,0,U,16,4", 1.0),
            self.taken("ours", "A,1,packing,keep", 1.0, 3.0),
            self.taken("ours", "A,1,packing", 2.0),
        ]
        rows = {row["kept"]: (row["ratio"], row["trl_flash"], row["range"]) for row in rows_of(taken)}
        assert rows == {True: (0.5, "4", [1000.0, 3000.0]), False: (0.25, "2", [2000.0, 2000.0])}

    def test_each_of_our_variants_has_a_trl_variant(self) -> None:
        from benchmarks.step_gpu import OURS, TRL

        ours = {(way.split(",")[0], "keep" in way.split(",")) for way in OURS}
        theirs = {(way.split(",")[3], way.split(",")[2] == "0") for way in TRL}
        assert ours == theirs == {(case, saved) for case in step_case.WORK for saved in (True, False)}

    def test_fastest_variants_that_fit_are_compared(self) -> None:
        from benchmarks.step_gpu import fitting_row

        taken = [
            self.taken("ours", "A,1,8bit,0", 3.0, 1.0, 2.0),
            self.taken("ours", "A,1,0.2", 4.0),
            {"side": "ours", "way": "A,9,0", "failed": step_case.NO_MEMORY},
            self.taken("ours", "B,1,0", 1.0),
            self.taken("trl", "bf16,1,0,A,4,4", 8.0),
        ]
        row, alone = fitting_row("A", taken), fitting_row("B", taken)
        assert (row["way"], row["range"], row["trl_way"], row["ratio"]) == (
            *("A,1,8bit,0", [1000.0, 3000.0]),
            *("bf16,1,0,A,4,4", 0.25),
        )
        assert alone["ms"] == 1000 and "ratio" not in alone

    @pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are for a CPU")
    def test_our_half_within_a_memory_limit_runs_at_toy_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from benchmarks import step_gpu

        assert step_gpu.OURS_FITTING.keys() == step_case.WORK.keys()
        monkeypatch.setattr(step_gpu, "OURS_FITTING", {"A": ("2000,8bit,0.5",)})
        monkeypatch.setattr(step_gpu, "TRL_FITTING", ())
        (row,) = step_gpu.fits(["A"], 1, small=True)
        assert row["way"] == "A,2000,8bit,0.5,packing,bf16" and row["ms"] > 0

    def test_whole_steps_include_trl_without_recomputation(self) -> None:
        from benchmarks.rl_step_gpu import TRL

        assert {way.split(",")[1] for way in TRL} == {"0", "1"}

    def test_one_case_has_no_shared_prefix(self) -> None:
        """Cases U and Q differ only in shared prompts: the answers have the same lengths, but in U each answer has
        images of its own."""
        shared, alone = (step_case.Case(Path(), name, small=True) for name in ("Q", "U"))
        assert shared.lengths.tolist() == alone.lengths.tolist()
        images = [[image.tobytes() for each in case.images for image in each] for case in (shared, alone)]
        assert [len(set(each)) for each in images] == [12, 96]
        assert [len({case.prompt_of(row) for row in range(48)}) for case in (shared, alone)] == [6, 48]

    @pytest.mark.parametrize(
        ("case", "tokens"), [("A", 37_504), ("B", 86_656), ("C", 58_194), ("Q", 42_129), ("U", 42_129)]
    )
    def test_cases_have_the_measured_token_counts(self, case: str, tokens: int) -> None:
        """The expected numbers of tokens, without padding, were computed by verl 0.9.1."""
        work = step_case.WORK[case]
        rows = step_case.Case(Path(), case).lengths.sum() + work.rows * work.prompt_tokens
        assert rows == tokens

    @pytest.mark.parametrize(
        ("case", "seconds", "mfu"), [("A", 0.75, 0.53), ("B", 2.464, 0.55), ("C", 1.514, 0.53), ("U", 2.232, 0.5)]
    )
    def test_needed_operations_equal_an_independent_count(self, case: str, seconds: float, mfu: float) -> None:
        """The expected shares of the GPU's peak were computed independently of this code. They must agree to the
        percent."""
        result = step_case.needed_flops(step_case.Case(Path(), case)) / seconds / step_case.PEAK_FLOPS
        assert result == pytest.approx(mfu, abs=0.01)
