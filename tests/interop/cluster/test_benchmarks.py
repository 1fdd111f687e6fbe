"""Our half of the benchmark of stores that sends small files to moto's server."""

from __future__ import annotations

import json

import pytest

from benchmarks import store_s3


@pytest.mark.slow
def test_files_are_written_to_s3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"FILES": 20, "BASELINE_FILES": 10, "DELAY": 0.001}.items():
        monkeypatch.setattr(store_s3, name, value)
    store_s3.main()
    speed, requests = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert speed["ours"] > 0 and requests["baseline"] >= 1
