"""The rollout viewer: nothing hostile becomes markup, nothing is lost, nothing is fetched."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.videos import decode_video
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.rollouts import Failure
from armature.components.pages.records import TurnScores
from armature.components.pages.report import HtmlReport, Limits, Rollouts, write_report
from tests.images import other_images, raw_png, turned_images
from tests.models.clips import clip
from tests.pages.conftest import MemoryImages, make_trajectory

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "]]>{{ 7*7 }}{% raw %}",
    "\u2028\u2029\x00\ud800",
    '"><svg onload=alert(1)>',
]


class Outline(HTMLParser):
    """A parsed HTML page: `tags` are all start tags with their attributes, and `scripts` the texts of script elements
    by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._inside = dict(attrs).get("id") or "program"

    def handle_endtag(self, tag):
        if tag == "script":
            self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data

    @property
    def data(self):
        return json.loads(self.scripts["data"])

    @property
    def shape(self):
        return [(tag, sorted(attrs)) for tag, attrs in self.tags]


def outline(page: Path) -> Outline:
    return Outline(page.read_text("utf-8"))


def write(page: Path, trajectories, images=None, **more):
    title, failures = more.pop("title", "Rollouts"), more.pop("failures", ())
    rollouts = Rollouts(trajectories, failures, images or MemoryImages(), chr, **more)
    write_report(page, HtmlReport(title, rollouts=rollouts))
    return outline(page)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_does_not_become_markup(page, text):
    failure = Failure(text, text, text, text, text)
    hostile = write(
        page, [make_trajectory(text, completion=text, prompt=text, group=text)], failures=[failure], title=text
    )
    tame = write(page, [make_trajectory("a", completion="b")], failures=[Failure("x", "x", "x", "x", "x")])
    assert hostile.shape == tame.shape
    shown = hostile.data["trajectories"][0]["turns"][0]["completion"]
    assert shown == text.encode("utf-8", "replace").decode() or "\ud800" in text


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_survives_in_the_page(page, text):
    data = write(page, [make_trajectory("t", completion=text, prompt=text)]).data
    turn = data["trajectories"][0]["turns"][0]
    assert turn["completion"] == text
    assert "".join(data["tokens"][str(token)] for token in turn["ids"]) == text
    assert json.loads(turn["messages"])[0]["content"][-1]["text"] == text


def test_every_trajectory_and_failure_appears_once(page):
    trajectories = [make_trajectory(f"t{i}", group=f"g{i // 4}", reward=i % 2) for i in range(24)]
    failures = [Failure(f"f{i}", "g9", "colors/9", "timeout", "late") for i in range(3)]
    data = write(page, trajectories, failures=failures).data
    assert [t["id"] for t in data["trajectories"]] == [t.trajectory_id for t in trajectories]
    assert [f["id"] for f in data["failures"]] == ["f0", "f1", "f2"]
    assert data["omitted"] == {"trajectories": 0, "images": 0}


def test_each_image_is_read_and_embedded_once(page, images):
    shared, other = images.put(20, 10, 0), images.put(8, 8, 1)
    trajectories = [make_trajectory(f"t{i}", (shared, other) if i else (shared,)) for i in range(10)]
    data = write(page, trajectories, images).data
    assert sorted(images.reads) == sorted([shared.sha256, other.sha256])
    assert set(data["images"]) == {shared.sha256, other.sha256}
    assert page.read_text().count("data:image/png;base64,") == 2


def test_large_images_are_scaled_down(page, images):
    data = write(page, [make_trajectory("t", (images.put(900, 300, 0),))], images).data
    (image,) = data["images"].values()
    assert image["uri"].startswith("data:image/webp;base64,") and (image["width"], image["height"]) == (900, 300)
    assert len(image["uri"]) < 900 * 300


@pytest.mark.parametrize(("side", "size"), [(40, (40, 27)), (512, (96, 64))])
def test_videos_are_embedded_with_all_frames(side, size, page, tmp_path):
    store, video = ImageStore(tmp_path / "images"), clip(5, 0.5)
    ref = store.put(video)
    data = write(page, [make_trajectory("t", (ref,))], store, limits=Limits(image_side=side)).data
    shown = decode_video(EncodedImage.from_url(data["images"][ref.sha256]["uri"]))
    assert shown.times == decode_video(video).times and {frame.size for frame in shown.frames} == {size}


def test_images_beyond_the_budget_are_counted(page, images):
    refs = [images.put(30, 30, seed) for seed in range(6)]
    trajectories = [make_trajectory(f"t{i}", (ref,)) for i, ref in enumerate(refs)]
    data = write(page, trajectories, images, limits=Limits(image_bytes=9000)).data
    assert 0 < len(data["images"]) < 6
    assert len(data["images"]) + data["omitted"]["images"] == 6


def test_limit_keeps_whole_groups(page):
    trajectories = [make_trajectory(f"t{i}", group=f"g{i // 4}") for i in range(40)]
    data = write(page, trajectories, limits=Limits(trajectories=12)).data
    groups = [t["group"] for t in data["trajectories"]]
    assert groups == [g for g in ("g0", "g3", "g6") for _ in range(4)]
    assert data["omitted"]["trajectories"] == 28


def test_page_is_self_contained(page, images):
    result = write(page, [make_trajectory("t", (images.put(8, 8, 0),))], images)
    text = page.read_text()
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|//cdn|@import|url\(", text)
    assert not [tag for tag, attrs in result.tags if tag in {"link", "iframe", "object"} or "src" in attrs]
    policy = next(attrs["content"] for _, attrs in result.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy


def test_page_has_ratios_and_advantages(page):
    trajectory = make_trajectory("t", completion="ab")
    scores = TurnScores(np.array([0, np.nan], np.float32), np.array([0.25, 0.25], np.float32))
    data = write(page, [trajectory], scores={"t": [scores]}, steps={"t": 7}).data
    turn = data["trajectories"][0]["turns"][0]
    assert turn["ratios"] == [1.0, None]
    assert turn["advantages"] == 0.25
    assert data["trajectories"][0]["step"] == 7
    doubled = TurnScores(np.array([math.log(2), 0], np.float32), np.array([1.0, 2.0], np.float32))
    turn = write(page, [trajectory], scores={"t": [doubled]}).data["trajectories"][0]["turns"][0]
    assert turn["ratios"] == pytest.approx([2.0, 1.0], abs=1e-4) and turn["advantages"] == [1.0, 2.0]


def test_equal_rollouts_give_equal_pages(page, images):
    ref = images.put(600, 600, 0)
    write(page, [make_trajectory("t", (ref,))], images)
    first = page.read_bytes()
    write(page, [make_trajectory("t", (ref,))], images)
    assert page.read_bytes() == first


def test_rejects_too_large_image(page, images):
    ref = images.keep(raw_png(8500, 8500, 8, 2, bytes(8500)).data, 8500, 8500)
    with pytest.raises(DataError):
        write(page, [make_trajectory("t", (ref,))], images)


@pytest.mark.parametrize("side", [40, 512])
def test_images_are_embedded_as_stored(page, tmp_path, side):
    store = ImageStore(tmp_path / "images")
    refs = [store.put(image) for image in (turned_images()["JPEG RGB EXIF 6"], other_images()["PNG RGBA"])]
    data = write(page, [make_trajectory("t", refs)], store, limits=Limits(image_side=side)).data
    for ref in refs:
        shown = data["images"][ref.sha256]
        assert (shown["width"], shown["height"]) == (ref.width, ref.height)
        with Image.open(io.BytesIO(base64.b64decode(shown["uri"].partition(",")[2]))) as drawn:
            stored = store.open(ref).resize(drawn.size)
            assert np.abs(np.asarray(drawn.convert("RGB"), float) - np.asarray(stored)).mean() < 12
            assert (drawn.width < drawn.height) == (ref.width < ref.height)
