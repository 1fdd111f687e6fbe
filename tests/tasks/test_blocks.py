"""A secret in a block of Prefect's reaches the child that needs it, and nothing else."""

from __future__ import annotations

import pytest

from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine

MACHINE = Machine.model_validate({"server_environment": {"HF_TOKEN": {"prefect_secret": "hub-token"}}})


@pytest.mark.usefixtures("prefect_server")
def test_a_block_is_read_by_the_flow_that_names_it() -> None:
    from prefect.blocks.system import Secret

    from tasks.flow_run import read_blocks

    with pytest.raises(ConfigurationError, match="only flows read blocks"):
        MACHINE.server_variables()
    with pytest.raises(ConfigurationError, match="no Secret block 'hub-token'"):
        read_blocks(MACHINE)
    Secret(value="hf_SecretOfABlock").save("hub-token")
    read_blocks(MACHINE)
    assert MACHINE.server_variables() == {"HF_TOKEN": "hf_SecretOfABlock"}
    assert "hf_Secret" not in repr(MACHINE) + MACHINE.model_dump_json()
