"""The services of compose answer to their passwords alone."""

from __future__ import annotations

import pytest

from tests.production.conftest import Platform

pytestmark = pytest.mark.timeout(900)


def status(platform: Platform, url: str, login: str = "") -> int:
    """Send a GET request from the platform's node and return the status code of the response."""
    ask = "import httpx, sys; url, *login = sys.argv[1:]; print(httpx.get(url, auth=tuple(login) or None).status_code)"
    return int(platform.node.run(["python", "-c", ask, url, *filter(None, login.split(":"))]))


def test_prefect_needs_its_password(platform):
    url = "http://prefect-server:4200/api/admin/version"
    assert status(platform, url) == 401
    assert status(platform, url, "armature:wrong-password") == 401
    assert status(platform, url, platform.environment["PREFECT_API_AUTH_STRING"]) == 200


def test_mlflow_needs_its_password(platform):
    url = "http://mlflow:5000/api/2.0/mlflow/experiments/get?experiment_id=0"
    user = platform.environment["MLFLOW_TRACKING_USERNAME"]
    assert status(platform, url) == 401
    assert status(platform, url, f"{user}:wrong-password") == 401
    assert status(platform, url, f"{user}:{platform.environment['MLFLOW_TRACKING_PASSWORD']}") == 200


def test_postgres_refuses_other_machines_without_password(platform, network):
    stranger = network.add("stranger")
    connect = "import psycopg2; psycopg2.connect('postgresql://armature@postgres/mlflow', connect_timeout=10)"
    with pytest.raises(AssertionError, match="no password supplied"):
        stranger.run(["python", "-c", connect])
    stranger.run(["python", "-c", connect], {"PGPASSWORD": platform.compose.environment("mlflow")["PGPASSWORD"]})
