"""Secrets are named in settings, never written there; what is recorded, shown or on a command line has none."""

from __future__ import annotations

import json
import traceback

import jsonschema
import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.machine import Machine
from tests.refusals import refused

VALUE = "hf_AbCdEfGhIjKlMnOp"
PLAIN = {
    "the servers' token": f'machine.servers.environment.HF_TOKEN="{VALUE}"',
    "a bare word": f"machine.servers.environment.HF_TOKEN={VALUE}",
    "the trainer's key": f'machine.trainer.environment={{WANDB_API_KEY="{VALUE}"}}',
    "another's token under a name of no meaning": f'machine.trainer.environment={{X="{VALUE}"}}',
    "a password": f'machine.servers.environment={{DBPASSWORD="{VALUE}"}}',
    "a small name": f'machine.servers.environment={{my_secret="{VALUE}"}}',
    "one among others": f'machine.servers.environment={{A="1", AWS_SECRET_ACCESS_KEY="{VALUE}", B="2"}}',
    "a proxy's password": f'machine.servers.environment={{HTTP_PROXY="http://me:{VALUE}@proxy:3128"}}',
    "an argument of the servers": f'machine.servers.arguments={{api-key="{VALUE}"}}',
    "an argument, written otherwise": f'machine.servers.arguments={{hf_token="{VALUE}"}}',
    "a store's URL": f'machine.remote_store="ftp://me:{VALUE}@host/store"',
    "a server's URL": f'machine.servers.endpoints=["http://me:{VALUE}@host:8000"]',
}


@pytest.mark.parametrize("override", PLAIN.values(), ids=PLAIN)
def test_rejects_plain_text_secret_without_repeating_it(override):
    with refused("plain_secret") as caught:
        load_recipe("train-vlm/colors", [override])
    assert VALUE not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "override",
    [
        'machine.servers.environment={TOKENIZERS_PARALLELISM="false", NCCL_SOCKET_IFNAME="eth1"}',
        'machine.servers.environment={SSL_KEYFILE="/etc/key.pem", AWS_WEB_IDENTITY_TOKEN_FILE="/run/token"}',
        'machine.servers.arguments={max_num_batched_tokens=8192, tokenizer_mode="slow", ssl_keyfile="/etc/key.pem"}',
        'machine.remote_store="s3://bucket/prefix"',
    ],
)
def test_accepts_values_that_only_resemble_secrets(override):
    load_recipe("train-vlm/colors", [override])


@pytest.mark.parametrize(
    ("value", "code"),
    [
        *(('"x"', "plain_secret"), ("3", "model_type"), ("[]", "model_type")),
        *(('{ env = "A B" }', "string_pattern_mismatch"), ('{ env = "" }', "string_pattern_mismatch")),
        ('{ env = "A", default = "x" }', "extra_forbidden"),
    ],
)
def test_rejects_invalid_secret_reference(value, code):
    with refused(code, "machine.servers.environment"):
        load_recipe("train-vlm/colors", [f"machine.servers.environment={{HF_TOKEN={value}}}"])


def test_child_gets_the_value_and_records_have_the_name(monkeypatch):
    from armature.components.inference.command import server_environment

    monkeypatch.setenv("MY_TOKEN", VALUE)
    recipe = load_recipe("train-vlm/colors", ['machine.servers.environment={HF_TOKEN={env="MY_TOKEN"}, A="1"}'])
    machine = recipe.sections["machine"]
    child = server_environment(machine, api_key="k", gpus=())
    assert child["HF_TOKEN"] == VALUE and child["A"] == "1"
    recorded = json.dumps(recipe.dump())
    assert VALUE not in recorded + repr(machine) and '"HF_TOKEN": {"env": "MY_TOKEN"}' in recorded
    assert Machine.model_validate_json(machine.model_dump_json()) == machine


def test_unset_variable_is_named(monkeypatch):
    from armature.check import check_machine

    monkeypatch.delenv("NOT_HERE", raising=False)
    machine = Machine.model_validate({"trainer": {"environment": {"HF_TOKEN": {"env": "NOT_HERE"}}}})
    with refused("environment_variable_missing", "NOT_HERE", "machine.trainer.environment.HF_TOKEN"):
        check_machine(machine, with_servers=False)


def test_trainer_settings_on_disk_have_the_reference(tmp_path, monkeypatch):
    from armature.components.contracts.secrets import resolve
    from armature.components.robots.imitation.settings import TrainVLASettings
    from armature.components.robots.imitation.train import PolicyTraining
    from armature.components.training.service_settings import ServiceSettings, service_settings

    monkeypatch.setenv("MY_TOKEN", VALUE)
    recipe = load_recipe("train-vla/tiny", ['machine.trainer.environment={HF_TOKEN={env="MY_TOKEN"}}'])
    machine, settings = recipe.sections["machine"], recipe.settings_for(TrainVLASettings)
    inputs = dict.fromkeys(("policy", "dataset", "statistics"), tmp_path)
    training = PolicyTraining(settings=settings, **inputs, fingerprint="f")
    written = service_settings(training, machine, tmp_path).model_dump_json()
    assert VALUE not in written
    environment = ServiceSettings.model_validate_json(written).processes.environment
    assert resolve(environment, "trainer.json")["HF_TOKEN"] == VALUE


@pytest.mark.parametrize(
    ("environment", "fits"),
    [
        ({"HF_TOKEN": VALUE}, False),
        ({"HF_TOKEN": "short"}, False),
        ({"X": VALUE}, False),
        ({"HTTP_PROXY": "http://me:secret@proxy"}, False),
        ({"HF_TOKEN": {"env": "HF_TOKEN"}, "A": "1", "HTTP_PROXY": "http://proxy:3128"}, True),
    ],
)
def test_prefect_schema_rejects_plain_secrets(environment, fits):
    """Prefect stores a run's parameters when the run is made, before any of our code sees them."""
    validator = jsonschema.Draft202012Validator(Machine.model_json_schema())
    assert validator.is_valid({"servers": {"environment": environment}}) == fits
