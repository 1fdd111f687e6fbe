"""An HTML report in one file: key figures, curves, images, tables, rollouts and the configuration.

The page contains the viewer with its data, style and script, so it works offline and can be sent to others. Its content
comes from models and environments and is not trusted: text is inserted by Jinja with autoescaping, or as JSON that the
script writes with `textContent`. A content security policy lists the hashes of the page's own script and style, so
nothing else is executed, and no address is ever contacted.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from armature.components.artifacts.images import decode
from armature.components.artifacts.videos import decode_video, encode_video
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import VIDEO, EncodedImage, ImageRef, data_url
from armature.components.contracts.metrics import dump_json
from armature.components.contracts.rollouts import Failure, Trajectory
from armature.components.pages.records import Decode, TurnScores, rollout_record

# --- Learning curves of a run's history, which has one dict of numbers per step; the page's script draws them ---

History = Sequence[Mapping[str, float]]
MOST_POINTS = 1500


@dataclass(frozen=True)
class Panel:
    """One chart of a run's history. `series` are the keys of its curves; a text that begins with ^ is a regular
    expression that matches keys.

    `band` is a region around the first curve: the key of its half-width, or a pair of keys for its limits (low, high).
    `axis` names the unit that the key "step" counts. `log` draws the values on a logarithmic axis.
    """

    title: str
    series: tuple[str, ...]
    unit: str = ""
    band: str | tuple[str, str] | None = None
    log: bool = False
    axis: str = "step"


@dataclass(frozen=True)
class Curves:
    """Charts, and the rows of numbers that they show. Each row has the key "step"."""

    panels: Sequence[Panel]
    rows: History


PANELS = (
    Panel("Reward of the rollouts", ("reward",), band="reward/rollout_std"),
    Panel("Success of the rollouts", ("success",)),
    Panel("Held-out accuracy", ("heldout/accuracy",), band=("heldout/low", "heldout/high")),
    Panel("Held-out success", ("heldout/success",), band=("heldout/low", "heldout/high")),
    Panel("Held-out episodes gained and lost", ("heldout/gained", "heldout/lost")),
    Panel("Actions of a held-out episode", ("heldout/steps",)),
    Panel("Answers of an episode", ("answers/per_episode",)),
    Panel("Answers of a step that say no actions", ("answers/undecoded",)),
    Panel("Reward by part", (r"^reward_parts/",)),
    Panel(
        "Mismatch KL, trainer against sampler",
        ("mismatch_kl", "mismatch_kl/first_update"),
        unit="nats per token",
        log=True,
    ),
    Panel("Importance ratio", ("importance_ratio", "ratio/p01", "ratio/p50", "ratio/p99")),
    Panel("KL of a step's updates, from the policy that played", ("kl",), unit="nats", log=True),
    Panel("KL to the policy that the training began with", ("kl/start",), unit="nats", log=True),
    Panel("Probability of a demonstrated token", ("probability",)),
    Panel("Entropy", ("entropy",), unit="nats per token"),
    Panel("Loss", ("loss", "heldout/loss")),
    Panel("Loss by part", ("loss/flow", "loss/cross_entropy", "loss/z"), log=True),
    Panel("Loss of behavior cloning", ("bc/loss",)),
    Panel(
        "Error of held-out actions, and of the mean action",
        ("heldout/action_error", "heldout/mean_action_error"),
        unit="standard deviations",
    ),
    Panel("Loss of the value head", ("value/loss",), log=True),
    Panel("Returns and the values that were predicted", ("return/mean", "value/mean")),
    Panel("Variance of the returns that values explain", ("value/explained_variance",)),
    Panel("Learning rate", (r"^learning_rate/",)),
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
    ),
    Panel(
        "Advantages",
        ("advantage/turn_absmean", "advantage/episode_absmean", "advantage/step_absmean", "penalty/mean"),
    ),
    Panel("Turns at one state", ("anchors/size", "anchors/size_max", "anchors/singleton_fraction"), log=True),
    Panel(
        "Groups of a step",
        ("groups/played", "groups/equal_rewards", "groups/surplus", "groups/rounds"),
    ),
    Panel("Completion length", ("tokens/completion", "tokens/completion_max"), unit="tokens"),
    Panel("Time of a step", (r"^timing/(wait_for_rollouts|batch|train|save|sync|evaluation)$",), unit="seconds"),
    Panel("Samples per second", ("samples_per_second", "answers_per_second")),
    Panel("Left out, by reason", (r"^failures/", r"^drops/"), unit="per step"),
    Panel("Memory of the trainer", (r"^memory/",), unit="GiB"),
)


def training_curves(history: History) -> Curves:
    """Return the charts of a training's history, with about `MOST_POINTS` of its rows at most."""
    numbered = [{"step": float(place), **row} for place, row in enumerate(history)]
    return Curves(panels_of(numbered), thinned(numbered, MOST_POINTS))


def panels_of(history: History) -> list[Panel]:
    """Return the panels in `PANELS` for which this history has numbers. Regular expressions in their `series` are
    replaced by the keys that they match."""
    keys = sorted({key for row in history for key in row})
    panels = []
    for panel in PANELS:
        names: list[str] = []
        for series in panel.series:
            matching = [k for k in keys if re.match(series, k)] if series.startswith("^") else [series]
            names += [key for key in matching if key in keys and key not in names]
        if names:
            panels.append(replace(panel, series=tuple(names)))
    return panels


def thinned(history: History, most: int) -> list[Mapping[str, float]]:
    """Return about `most` rows of a history, evenly spread. The last row and the rows with an evaluation are always
    among them."""
    every = -(-len(history) // most)
    if every <= 1:
        return list(history)
    return [
        row
        for place, row in enumerate(history, 1)
        if place % every == 0 or place == len(history) or "heldout/accuracy" in row
    ]


ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("rollout.js", "chart.js", "export.js", "view.js")


class ImageReader(Protocol):
    """A reader of an image's bytes, such as the image store."""

    def read(self, ref: ImageRef, /) -> bytes: ...


@dataclass(frozen=True)
class Limits:
    """Upper bounds for the rollouts on one page. The page shows how many rollouts and images were left out."""

    trajectories: int = 2000
    tokens: int = 400_000
    image_side: int = 512  # pixels; larger images are scaled down
    image_bytes: int = 24 * 2**20  # all embedded images together


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Rollouts for a page. `steps` and `scores` are keyed by trajectory id; `scores` has one entry per turn.

    `images` reads from the image store, and each image is embedded once. `decode` returns the text of one token id.
    """

    trajectories: Sequence[Trajectory]
    failures: Sequence[Failure]
    images: ImageReader
    decode: Decode
    steps: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, Sequence[TurnScores]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class ReportImage:
    """An image of the report. `uri` is a data URI with the image, and `description` is the alternative text."""

    title: str
    uri: str
    description: str


@dataclass(frozen=True)
class Table:
    """A table of the report. A cell is a text, a formatted number, or an object with the numbers `estimate`, `low` and
    `high`, which is drawn as a bar."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class HtmlReport:
    """The content of the page, from top to bottom. `links` maps labels to relative or web addresses."""

    title: str
    figures: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    images: Sequence[ReportImage] = ()
    tables: Sequence[Table] = ()
    configuration: Mapping[str, Any] = field(default_factory=dict)
    curves: Sequence[Curves] = ()
    rollouts: Rollouts | None = None


def write_report(path: Path, report: HtmlReport) -> None:
    """Write the page. Equal reports give equal bytes.

    Raises:
        DataError: a link is neither relative nor a web address, or an image of the rollouts cannot be read.
    """
    for label, address in report.links.items():
        if urlsplit(address).scheme not in ("", "http", "https"):
            raise DataError(f"not a link: {address!r}", code="invalid_link", where=f"link {label!r} of {path}")
    style, script = _text("page.css"), "\n".join(map(_text, _SCRIPTS))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _template().render(
        report=report,
        configuration=flatten(report.configuration),
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=_inline_json(_data(report)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Decoded completions may contain unpaired surrogates, which cannot be encoded as UTF-8.
    path.write_text(page, "utf-8", errors="replace")


def live_page() -> str:
    """Return the HTML of the viewer's page, which loads its data from the viewer's server."""
    return _template().render(report=None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as pairs (dotted name, JSON value), in their order.

    >>> flatten({"trainer": {"seed": 1}})
    [('trainer.seed', '1')]
    """
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", json.dumps(value, ensure_ascii=False, default=str)))
    return rows


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html")


def _text(asset: str) -> str:
    return (ASSETS / asset).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _inline_json(value: Any) -> Markup:
    """Return a value as JSON for a script element. The text can neither end the element nor begin a comment in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _data(report: HtmlReport) -> dict[str, Any]:
    curves = json.loads(dump_json(report.curves))
    return {"title": report.title, "curves": curves, **_rollout_data(report.rollouts)}


def _rollout_data(rollouts: Rollouts | None) -> dict[str, Any]:
    if rollouts is None:
        return {"trajectories": [], "failures": [], "tokens": {}, "images": {}, "omitted": {}}
    shown = _select(rollouts.trajectories, rollouts.limits)
    book = _EmbeddedImages(rollouts.images, rollouts.limits)
    pieces: dict[int, str] = {}

    def piece(token: int) -> str:
        if token not in pieces:
            pieces[token] = rollouts.decode(token)
        return pieces[token]

    records = []
    for each in shown:
        step, scores = rollouts.steps.get(each.trajectory_id), rollouts.scores.get(each.trajectory_id, ())
        records.append(rollout_record(each, step, scores, book.add, piece))
    return {
        "trajectories": records,
        "failures": [
            {"id": f.trajectory_id, "group": f.group_id, "task": f.task_id, "reason": f.reason, "detail": f.detail}
            for f in rollouts.failures
        ],
        "tokens": {str(token): text for token, text in sorted(pieces.items())},
        "images": book.images,
        "omitted": {"trajectories": len(rollouts.trajectories) - len(shown), "images": len(book.left_out)},
    }


def _select(trajectories: Sequence[Trajectory], limits: Limits) -> list[Trajectory]:
    """Return all trajectories. If they exceed the limits, return only some whole groups, evenly spread over the run."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    tokens = sum(len(turn.completion_token_ids) for trajectory in trajectories for turn in trajectory.turns)
    share = min(1.0, limits.trajectories / max(1, len(trajectories)), limits.tokens / max(1, tokens))
    if share == 1.0:
        return list(trajectories)
    names = list(groups)
    count = max(1, int(len(names) * share))
    spread = [names[i * len(names) // count] for i in range(count)]
    return [trajectory for name in spread for trajectory in groups[name]]


class _EmbeddedImages:
    """The images that a page embeds. Each image is embedded once, and large images are scaled down.

    `images` maps an image's SHA-256 to its data URI and original size. When all embedded images together have
    `Limits.image_bytes`, the keys of further images are only added to `left_out`.
    """

    def __init__(self, reader: ImageReader, limits: Limits) -> None:
        self._reader, self._side, self._bytes_left = reader, limits.image_side, limits.image_bytes
        self.images: dict[str, dict[str, object]] = {}
        self.left_out: set[str] = set()

    def add(self, ref: ImageRef) -> str:
        """Embed an image unless it would exceed the limit of bytes. Return its key, the SHA-256."""
        key = ref.sha256
        if key in self.images or key in self.left_out:
            return key
        uri = data_url(*self._encode(ref)) if self._bytes_left > 0 else ""
        if not uri or len(uri) > self._bytes_left:
            self._bytes_left = 0
            self.left_out.add(key)
            return key
        self._bytes_left -= len(uri)
        self.images[key] = {"uri": uri, "width": ref.width, "height": ref.height}
        return key

    def _encode(self, ref: ImageRef) -> tuple[bytes, str]:
        image = EncodedImage(self._reader.read(ref), ref.media_type)
        if max(ref.width, ref.height) <= self._side:
            return image.data, image.media_type
        if ref.media_type == VIDEO:
            video = decode_video(image)
            for frame in video.frames:
                frame.thumbnail((self._side, self._side))
            image = encode_video(video.frames, video.times)
            return image.data, image.media_type
        small = decode(image)
        small.thumbnail((self._side, self._side))
        out = BytesIO()
        small.save(out, "WEBP", quality=80, method=4)
        return out.getvalue(), "image/webp"
