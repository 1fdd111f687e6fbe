"""A secret in a block of Prefect's reaches the child that needs it, and nothing else."""

from __future__ import annotations

import pytest

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.secrets import resolve
from armature.components.environments.settings import EnvironmentSettings
from armature.components.rewards.reward import RewardSettings
from tests.builders import make_machine
from tests.refusals import refused

MACHINE = make_machine(servers__environment={"HF_TOKEN": {"prefect_secret": "hub-token"}})


@pytest.mark.usefixtures("prefect_server")
def test_flow_reads_the_secret_block_it_names():
    from prefect.blocks.system import Secret

    from armature.tasks.flow_run import read_blocks

    with pytest.raises(ConfigurationError) as caught:
        MACHINE.server_variables()
    assert caught.value.where == "machine.servers.environment.HF_TOKEN"
    with refused("secret_block_missing", "'hub-token'"):
        read_blocks({"machine": MACHINE})
    Secret(value="hf_SecretOfABlock").save("hub-token")
    read_blocks({"machine": MACHINE})
    assert MACHINE.server_variables() == {"HF_TOKEN": "hf_SecretOfABlock"}
    assert "hf_Secret" not in repr(MACHINE) + MACHINE.model_dump_json()


@pytest.mark.usefixtures("prefect_server")
def test_flow_reads_the_secret_block_of_a_reward():
    from prefect.blocks.system import Secret

    from armature.tasks.flow_run import read_blocks

    judge = {"name": "judge", "model": "m", "base_url": "http://host/v1", "template": "{completion}"}
    rewards = [{**judge, "api_key": {"prefect_secret": "judge-key"}}]
    args = {"source": "rows.jsonl", "prompt": "{question}", "rewards": rewards}
    sections = {"environment": EnvironmentSettings(name="dataset", args=args, seed=0)}
    with refused("secret_block_missing", "'judge-key'", "environment.args.rewards.0.api_key"):
        read_blocks(sections)
    Secret(value="sk-SecretOfABlock").save("judge-key")
    read_blocks(sections)
    ours = RewardSettings.model_validate(rewards[0]).own()
    assert resolve({"api_key": ours.api_key}, "reward judge") == {"api_key": "sk-SecretOfABlock"}
