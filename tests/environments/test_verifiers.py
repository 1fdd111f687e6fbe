"""The environment `verifiers` without the package. Tests with the package are in tests/interop/verifiers."""

from __future__ import annotations

from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused


def test_missing_package_error_names_install_command() -> None:
    args = {"interface": "legacy", "id": "sample-colors", "max_turns": 1}
    settings = EnvironmentSettings(name="verifiers", args=args, train_tasks=6, heldout_tasks=3)
    with refused("package_missing", "armature-vla[verifiers]"):
        make_environment(settings)
