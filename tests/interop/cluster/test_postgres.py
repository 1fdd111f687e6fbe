"""Addresses of databases open with the drivers that are installed on a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

INFRA = Path(__file__).parents[3] / "infra"
URL = re.compile(r"postgresql[+\w]*://\S+@\w+:\d+/\w+")
FOUND = [(file, url) for file in sorted(INFRA.rglob("*.env")) for url in URL.findall(file.read_text())]


@pytest.mark.parametrize(("file", "url"), FOUND, ids=[file.stem for file, _ in FOUND])
def test_driver_for_each_address_is_installed(file, url):
    address = make_url(url)
    engine = create_async_engine(address) if address.get_dialect().is_async else create_engine(address)
    assert engine.dialect.name == "postgresql"


def test_configuration_names_database_addresses():
    assert len(FOUND) == 2
