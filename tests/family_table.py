"""The tables of model families in docs/models.md: `python -m tests.family_table` writes them from recorded results.

Tests record results in tests/families.json if they run for all families, here for one of them:

    ARMATURE_TEST_FAMILIES=all python -m pytest tests/models tests/vlm/test_packing.py -k "qwen3.5 or two-gib"

Results of GPUs are entered by hand as `gpu`, with the keys `nats` (farthest log-prob), `kl` (mean KL, k3), `dtype`,
`device` and `versions`; a cell that cannot be measured gives the `reason` alone:

    "gpu": {"nats": 0.05, "kl": 1e-4, "dtype": "bfloat16", "device": "H200", "versions": {"torch": "…", "vllm": "…"}}
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from armature.components.families.family import COMPONENTS, FAMILIES, Family

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs/models.md", Path(__file__).with_name("families.json")
ALL = os.environ.get("ARMATURE_TEST_FAMILIES") == "all"
LIMITS = {"packed": 1e-5, "shared": 5e-5, "adapters": 1e-5, "tied": 1e-5, "untied": 1e-5, "video": 1e-5}
"""Largest differences of log-probs, in nats, that a table may contain."""
CELLS = ("load", "lora", *LIMITS, "gpu")
REASONS = {
    ("molmo2", "tied"): "refused by the family",
    ("glm4v-moe", "tied"): "refused: vLLM has an output head of its own",
    ("gemma4", "untied"): "always tied",
    ("molmo2", "adapters"): "vLLM applies none",
    ("glm4v-moe", "adapters"): "vLLM ends",
    ("qwen3-vl-moe", "adapters"): "vLLM ends",
    ("qwen3.5", "adapters"): "refused on CPU",
    ("qwen3.5-moe", "adapters"): "refused on CPU",
}
"""Results that no test can record, by family and cell, and the reason that the table gives."""
Results = Mapping[str, Mapping[str, Any]]


def can_run(family: str, cell: str) -> bool:
    """Return False if the table gives a reason in place of this result."""
    return (family, cell) not in REASONS and (cell != "video" or shows_videos(FAMILIES[family]))


def shows_videos(family: Family) -> bool:
    return family.images is not None and family.images.videos is not None


def scope(family: Family) -> str:
    """Return the widest `scope` of LoRA whose adapters vLLM serves, as the family declares."""
    return "all" if set(family.served_adapters) == set(COMPONENTS) else "".join(family.served_adapters[:1])


def record(family: str, cell: str, nats: float | None = None, *, served: bool = False, **facts: Any) -> None:
    """Store a result with the versions of the packages it is of, if the tests run for all families.

    A result of vLLM is `served`. A cell of several cases, such as "video", has the farthest of their `cases`.
    """
    if not ALL:
        return
    versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
    if served:
        (vllm,) = ROOT.glob(".venv-vllm/lib/python3*/site-packages/vllm*.dist-info")
        versions["vllm"] = vllm.stem.rpartition("-")[2].partition("+")[0]
    difference = {} if nats is None else {"nats": float(f"{nats:.1e}")}
    with RESULTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        results = json.load(file)
        results.setdefault(family, {})[cell] = difference | facts | {"versions": versions}
        text = json.dumps(results, indent=2, sort_keys=True) + "\n"
        file.seek(0)
        file.write(text)
        file.truncate()


def problems(results: Results) -> Iterator[str]:
    """Yield contradictions between results, limits and the abilities that families declare."""
    for name in results.keys() - FAMILIES.keys():
        yield f"{name}: not a family"
    for name, family in FAMILIES.items():
        measured = results.get(name, {})
        for cell in measured.keys() - set(CELLS):
            yield f"{name}, {cell}: unknown"
        for cell in CELLS[:-1]:
            if can_run(name, cell) != (cell in measured):
                yield f"{name}, {cell}: {'measured, but declared impossible' if cell in measured else 'not measured'}"
        for cell in measured.keys() & LIMITS.keys():
            if not measured[cell]["nats"] < LIMITS[cell]:
                yield f"{name}, {cell}: {measured[cell]['nats']} nats"
        if "adapters" in measured and measured["adapters"]["scope"] != scope(family):
            yield f"{name}, adapters: measured for the scope {measured['adapters']['scope']}"


def nats(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


def _served(name: str, measured: Mapping[str, Any], family: Family) -> str:
    parts = [f"✓ {nats(max(measured[cell]['nats'] for cell in ('tied', 'untied') if cell in measured))}"]
    parts += [f"{cell}: {REASONS[name, cell]}" for cell in ("tied", "untied") if (name, cell) in REASONS]
    return "; ".join(parts + ["causal images only"] * family.image_attention)


def _gpu(result: Mapping[str, Any] | None) -> str:
    if result is None or "reason" in result:
        return "not run" if result is None else result["reason"]
    versions = " ".join(f"{name} {number}" for name, number in sorted(result["versions"].items(), reverse=True))
    return f"✓ {nats(result['nats'])}, KL {nats(result['kl'])}; {result['dtype']}, {result['device']}, {versions}"


def row(name: str, measured: Mapping[str, Any]) -> list[str]:
    family = FAMILIES[name]
    adapters = REASONS.get((name, "adapters"))
    versions = {key: set[str]() for key in ("vllm", "transformers", "torch")}
    for cell in measured.keys() - {"gpu"}:
        for key, number in measured[cell]["versions"].items():
            versions[key].add(number)
    return [
        f"`{name}`",
        "✓",
        f"✓; adapters not served: {adapters}"
        if adapters
        else f"✓ {nats(measured['adapters']['nats'])}, {scope(family)}",
        *(f"✓ {nats(measured[cell]['nats'])}" for cell in ("packed", "shared")),
        f"✓ {nats(measured['video']['nats'])}" if shows_videos(family) else "refused",
        _served(name, measured, family),
        _gpu(measured.get("gpu")),
        ", ".join(f"{key} {' and '.join(sorted(numbers))}" for key, numbers in versions.items()),
    ]


def tables(results: Results) -> dict[str, str]:
    """Return the text of each table by its name, which is in a comment before it."""
    heads = ("family", "load", "LoRA", "packed", "shared", "video", "served on CPU", "served on GPU", "versions")
    videos = {name: results[name]["video"]["cases"] for name in FAMILIES if shows_videos(FAMILIES[name])}
    cases = list(next(iter(videos.values())))
    clips = [[f"`{name}`", *(nats(shown[case]) for case in cases)] for name, shown in videos.items()]
    return {
        "families": _table(heads, ":---", [row(name, results[name]) for name in FAMILIES]),
        "videos": _table(["family", *cases], "---:", clips),
    }


def _table(heads: Any, alignment: str, rows: list[list[str]]) -> str:
    lines = [heads, [":---", *[alignment] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """Return the text of docs/models.md with tables of the recorded results."""
    text = PAGE.read_text()
    for name, table in tables(json.loads(RESULTS.read_text())).items():
        begin, end = f"<!-- {name}: written by python -m tests.family_table -->\n", "<!-- end -->\n"
        text, count = re.subn(f"({begin}).*?({end})", lambda old, new=table: old[1] + new + old[2], text, flags=re.S)
        assert count == 1, f"docs/models.md has no {begin}"
    return text


if __name__ == "__main__":
    if wrong := sorted(problems(json.loads(RESULTS.read_text()))):
        raise SystemExit("\n".join(wrong))
    PAGE.write_text(page())
