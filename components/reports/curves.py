"""Learning curves from a run's history: one dict of numbers per step."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from armature.components.contracts.images import data_url
from armature.components.reports.report import ReportImage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, float]]

PALETTE = ("#3f7fc1", "#d57f2c", "#3b9b73", "#b2609f", "#c5524a", "#8c8a3a", "#5f6fd0", "#7d7d7d")
_INK = "#010203"  # stands for the page's ink; replaced in SVG, where the page may be dark


@dataclass(frozen=True)
class Panel:
    """One chart. `series` are history keys, or a regular expression where one begins with ^.

    `band` is the key of a half-width, drawn around the first series, or a pair of keys (low, high). `axis` is
    what the key "step" counts.
    """

    title: str
    series: tuple[str, ...]
    unit: str = ""
    band: str | tuple[str, str] | None = None
    log: bool = False
    stacked: bool = False
    limits: tuple[float | None, float | None] = (None, None)
    reference: float | None = None
    axis: str = "step"


PANELS = (
    Panel("Reward of the rollouts", ("reward",), band="reward/rollout_std"),
    Panel("Success of the rollouts", ("success",), limits=(-0.02, 1.02)),
    Panel("Held-out accuracy", ("heldout/accuracy",), band=("heldout/low", "heldout/high"), limits=(-0.02, 1.02)),
    Panel("Held-out success", ("heldout/success",), band=("heldout/low", "heldout/high"), limits=(-0.02, 1.02)),
    Panel("Held-out episodes gained and lost", ("heldout/gained", "heldout/lost"), limits=(0.0, None)),
    Panel("Actions of a held-out episode", ("heldout/steps",), limits=(0.0, None)),
    Panel("Answers of an episode", ("answers/per_episode",), limits=(0.0, None)),
    Panel("Answers of a step that say no actions", ("answers/undecoded",), limits=(0.0, None)),
    Panel("Reward by part", (r"^reward_parts/",)),
    Panel(
        "Mismatch KL, trainer against sampler",
        ("mismatch_kl", "mismatch_kl/first_update"),
        unit="nats per token",
        log=True,
    ),
    Panel("Importance ratio", ("importance_ratio", "ratio/p01", "ratio/p50", "ratio/p99"), reference=1.0),
    Panel("KL of a step's updates, from the policy that played", ("kl",), unit="nats", log=True),
    Panel("KL to the policy that the training began with", ("kl/start",), unit="nats", log=True),
    Panel("Probability of a demonstrated token", ("probability",), limits=(0.0, 1.02)),
    Panel("Entropy", ("entropy",), unit="nats per token", limits=(0.0, None)),
    Panel("Loss", ("loss", "heldout/loss"), reference=0.0),
    Panel("Loss by part", ("loss/flow", "loss/cross_entropy", "loss/z"), log=True),
    Panel("Loss of behavior cloning", ("bc/loss",)),
    Panel(
        "Error of held-out actions, and of the mean action",
        ("heldout/action_error", "heldout/mean_action_error"),
        unit="standard deviations",
        limits=(0.0, None),
    ),
    Panel("Loss of the value head", ("value/loss",), log=True),
    Panel("Returns and the values that were predicted", ("return/mean", "value/mean")),
    Panel("Variance of the returns that values explain", ("value/explained_variance",), limits=(-1.02, 1.02)),
    Panel("Learning rate", (r"^learning_rate/",), limits=(0.0, None)),
    Panel("Gradient norm", ("grad_norm", r"^grad_norm/"), log=True),
    Panel(
        "Fractions",
        (
            "groups/zero_advantage_fraction",
            "masked_fraction",
            "clipped_low_fraction",
            "clipped_high_fraction",
            "value/clipped_fraction",
            "padding_fraction",
            "truncated/length",
            "actions/format_defect",
            "actions/inadmissible",
        ),
        limits=(-0.02, 1.02),
    ),
    Panel(
        "Advantages",
        ("advantage/turn_absmean", "advantage/episode_absmean", "advantage/step_absmean", "penalty/mean"),
        limits=(0.0, None),
    ),
    Panel("Turns at one state", ("anchors/size", "anchors/size_max", "anchors/singleton_fraction"), log=True),
    Panel(
        "Groups of a step",
        ("groups/played", "groups/equal_rewards", "groups/surplus", "groups/rounds"),
        limits=(0.0, None),
    ),
    Panel("Completion length", ("tokens/completion", "tokens/completion_max"), unit="tokens", limits=(0.0, None)),
    Panel(
        "Time of a step", (r"^timing/(wait_for_rollouts|batch|train|sync|evaluation)$",), unit="seconds", stacked=True
    ),
    Panel("Samples per second", ("samples_per_second", "answers_per_second"), limits=(0.0, None)),
    Panel("Left out, by reason", (r"^failures/", r"^drops/"), unit="per step", limits=(0.0, None)),
    Panel("Memory of the trainer", (r"^memory/",), unit="GiB", limits=(0.0, None)),
)


def panels_of(history: History) -> list[tuple[Panel, list[str]]]:
    """The panels that this history has something for, each with its keys."""
    keys = sorted({key for row in history for key in row})
    found = []
    for panel in PANELS:
        names: list[str] = []
        for series in panel.series:
            matching = [k for k in keys if re.match(series, k)] if series.startswith("^") else [series]
            names += [key for key in matching if key in keys and key not in names]
        if names:
            found.append((panel, names))
    return found


def curves_png(history: History, title: str = "") -> bytes:
    """All panels in one PNG, 2 or 3 wide. The same history gives the same bytes."""
    found = panels_of(history)
    columns = 3 if len(found) > 4 else 2
    rows = max(1, math.ceil(len(found) / columns))
    with _figure(5.2 * columns, 3.3 * rows, rows, columns, ink="#222222") as (figure, axes):
        for axis, entry in zip(axes, found, strict=False):
            _draw(axis, *entry, history)
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        if title:
            figure.suptitle(title, fontsize=13)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def curve_images(history: History) -> list[ReportImage]:
    """One image per panel, as SVG that follows the reader's light or dark setting."""
    return [panel_image(panel, names, history) for panel, names in panels_of(history)]


def panel_image(panel: Panel, names: list[str], history: History) -> ReportImage:
    return ReportImage(panel.title, _svg_uri(panel, names, history), _describe(names, history))


def _describe(names: list[str], history: History) -> str:
    """What a reader without the image needs: first and last value of each series."""
    parts = []
    for name in names:
        _, values = _points(history, name)
        if values:
            parts.append(f"{name} from {values[0]:.4g} to {values[-1]:.4g}")
    return "; ".join(parts)


def _svg_uri(panel: Panel, names: list[str], history: History) -> str:
    with _figure(5.2, 3.1, 1, 1, ink=_INK) as (figure, axes):
        _draw(axes[0], panel, names, history)
        axes[0].set_title("", loc="left")
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    style = "<style>:root{color:#33332f}@media(prefers-color-scheme:dark){:root{color:#d5d5d0}}</style>"
    svg = out.getvalue().replace(_INK, "currentColor").replace("<defs>", style + "<defs>", 1)
    return data_url(svg.encode(), "image/svg+xml")


def _points(history: History, key: str) -> tuple[list[float], list[float]]:
    """Steps and values where `key` is a finite number; a row without "step" is numbered by its place."""
    rows = [
        (float(row.get("step", place)), float(row[key]))
        for place, row in enumerate(history)
        if key in row and row[key] is not None and math.isfinite(row[key])
    ]
    return [step for step, _ in rows], [value for _, value in rows]


def _draw(axis: Axes, panel: Panel, names: list[str], history: History) -> None:
    drawn = [(name, *_points(history, name)) for name in names]
    if panel.log:
        drawn = [(n, [s for s, v in zip(x, y, strict=True) if v > 0], [v for v in y if v > 0]) for n, x, y in drawn]
    prefix = _common_prefix(names)
    if panel.stacked:
        _draw_stacked(axis, [(name.removeprefix(prefix), *_points(history, name)) for name in names])
    else:
        for i, (name, steps, values) in enumerate(drawn):
            marker = "o" if len(values) < 25 else ""
            color = PALETTE[i % len(PALETTE)]
            axis.plot(steps, values, color=color, label=name.removeprefix(prefix), marker=marker, ms=3, lw=1.6)
        if panel.band:
            _draw_band(axis, panel.band, names[0], history)
    if panel.reference is not None:
        axis.axhline(panel.reference, color=PALETTE[-1], lw=0.8, ls="--", zorder=0)
    if panel.log and any(values for _, _, values in drawn):
        axis.set_yscale("log")
    axis.set_title(panel.title, fontsize=10.5, loc="left", fontweight="bold")
    axis.set_xlabel(panel.axis)
    axis.set_ylabel(panel.unit)
    if not panel.log:
        axis.set_ylim(*panel.limits)
    if len(names) > 1:
        axis.legend(
            fontsize=8,
            frameon=False,
            ncols=2 if max(map(len, names)) > 16 else 4,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.17),
        )


def _draw_band(axis: Axes, band: str | tuple[str, str], name: str, history: History) -> None:
    needed = (band,) if isinstance(band, str) else band
    rows = [row for row in history if all(math.isfinite(row.get(k, math.nan)) for k in (name, *needed))]
    if not rows:
        return
    steps = [float(row.get("step", place)) for place, row in enumerate(rows)]
    if isinstance(band, str):
        low, high = [r[name] - r[band] for r in rows], [r[name] + r[band] for r in rows]
    else:
        low, high = [r[band[0]] for r in rows], [r[band[1]] for r in rows]
    axis.fill_between(steps, low, high, color=PALETTE[0], alpha=0.2, lw=0)


def _draw_stacked(axis: Axes, drawn: list[tuple[str, list[float], list[float]]]) -> None:
    steps = sorted({step for _, x, _ in drawn for step in x})
    base = [0.0] * len(steps)
    for i, (name, x, y) in enumerate(drawn):
        values = dict(zip(x, y, strict=True))
        heights = [values.get(step, 0.0) for step in steps]
        axis.bar(steps, heights, 0.9, bottom=base, color=PALETTE[i % len(PALETTE)], label=name, lw=0)
        base = [low + height for low, height in zip(base, heights, strict=True)]


def _common_prefix(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    head = names[0].rpartition("/")[0]
    return f"{head}/" if head and all(name.startswith(f"{head}/") for name in names) else ""


@contextmanager
def _figure(width: float, height: float, rows: int, columns: int, ink: str) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure without pyplot's global state, drawn in `ink`, with settings that make its bytes repeatable."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    style: dict[Any, Any] = {
        "svg.hashsalt": "armature",
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.18,
        **dict.fromkeys(colored, ink),
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)
