"""Somebody has a laptop without a GPU: which recipes run here, what the others say, and the platform."""

from __future__ import annotations

import re

import httpx
import pytest

from armature.services import free_port
from tests.browser import NEEDS_CHROMIUM
from tests.first_hour.conftest import Newcomer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600), *NEEDS_CHROMIUM]

LARGE = "train-vlm/clevr-counting-7b"


def test_laptop_without_gpu_finds_a_recipe_and_watches_it_on_the_platform(newcomer: Newcomer) -> None:
    newcomer.variables["CUDA_VISIBLE_DEVICES"] = ""
    groups = newcomer.types("list").text.strip().split("\n\n")
    here, *others = [re.findall(r"^  (\S+)", group, re.MULTILINE) for group in groups]
    assert any(LARGE in group for group in others)
    refused = newcomer.types("run", LARGE, code=2).text
    (nearest,) = re.findall(r"armature run ([\w/-]+)", refused)
    assert "code: gpu_missing" in refused and "80 GiB" in refused and nearest in here

    misspelled = newcomer.types("run", nearest, "--set", "trainer.lr=1e-3", code=2).text
    assert "code: extra_forbidden" in misspelled and "learning_rate" in misspelled
    estimate = newcomer.types("check", nearest, "--configuration-only", "--gpu", "24GiB").text
    assert re.search(r"fits 24\.0 GiB", estimate)

    newcomer.types("status", code=1)
    ports = [free_port(), free_port()]
    newcomer.types("up", "--detach", "--prefect-server-port", str(ports[0]), "--mlflow-port", str(ports[1]))
    try:
        done = newcomer.types("run", nearest, "--set", "trainer.max_steps=2").text
        name = re.search(r"flow run '([\w-]+)'", done, re.IGNORECASE)
        status = newcomer.types("status").text
        runs = re.search(r"^runs +(http\S+)$", status, re.MULTILINE)
        password = re.search(r"^password .* (\S+)$", status, re.MULTILINE)
        assert name is not None and runs is not None and password is not None
        with newcomer.opens(runs[1]) as page:
            page.get_by_text(name[1]).first.wait_for()
            newcomer.saves(page, "mlflow")
        with newcomer.opens(f"http://127.0.0.1:{ports[0]}/runs") as page:
            page.locator("input[type=password]").fill((newcomer.folder / password[1]).read_text().strip())
            page.keyboard.press("Enter")
            page.get_by_text(name[1]).first.wait_for()
            newcomer.saves(page, "prefect")
    finally:
        newcomer.types("down")
    newcomer.types("status", code=1)
    for port in ports:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}", trust_env=False)
