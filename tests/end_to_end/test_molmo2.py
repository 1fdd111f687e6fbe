"""The recipe train-vlm/molmo2-tiny, much shortened: a warm start, two steps of GiGPO and an evaluation, all real."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file

from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.inference.server import VllmServer
from armature.components.models.source import CHECKPOINT
from tests.builders import make_machine
from tests.end_to_end.conftest import make

KEY = "a key for this test"
KINDS = {"pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep"}
SHORT = (
    "model.tiny.layers=1",
    "environment.train_tasks=24",
    f"environment.args.games.kinds={sorted(KINDS)}".replace("'", '"'),
    'environment.args.games.rooms=["Bedroom", "Bathroom"]',
    "environment.args.max_turns=10",
    "environment.args.max_invalid_actions=0",
    "environment.heldout_tasks=6",
    "warm_start.demonstrations=24",
    "warm_start.heldout_demonstrations=3",
    "warm_start.epochs=4",
    "rollouts.groups_per_step=3",
    "rollouts.group_size=4",
    "batches.penalty.inadmissible=0.1",  # two steps of such a beginner may see no win to learn from
    "preflight.groups=1",
    "trainer.max_steps=2",
    "trainer.warmup_steps=0",
    'evaluation.splits=["heldout"]',
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Artifact]:
    """The artifacts of the flow, by stage. The training and the evaluation join the same server, and each loads its own
    weights into it."""
    folder = tmp_path_factory.mktemp("molmo2")
    recipe = load_recipe("train-vlm/molmo2-tiny", (*SHORT, f'machine.store="{folder / "store"}"'))
    machine, inference = recipe.sections["machine"], recipe.sections["inference"]
    tasks, model = make(recipe, "tasks"), make(recipe, "model")
    started = make(recipe, "warm-start", tasks=tasks, model=model)
    with pytest.MonkeyPatch.context() as patch, start_blocking_portal() as portal:
        patch.setenv("VLLM_API_KEY", KEY)
        server = VllmServer(inference, machine, index=0, log_folder=folder / "server", api_key=KEY)
        portal.call(server.start, model.path)
        try:
            joined = make_machine(machine, endpoints=(server.url,))
            trained = make(recipe, "train-vlm", joined, tasks=tasks, model=started)
            evaluated = make(recipe, "evaluate", joined, tasks=tasks, model=trained)
        finally:
            portal.call(server.stop)
    return {"model": model, "warm-start": started, "train-vlm": trained, "evaluate": evaluated}


def document(artifact: Artifact, name: str) -> Any:
    return json.loads((artifact.path / name).read_text())


def weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    folder = artifact.path if artifact.path.joinpath("config.json").exists() else artifact.path / CHECKPOINT
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_warm_start_learns_the_plans(made):
    metrics = document(made["warm-start"], "metrics.json")
    assert metrics["heldout_loss"] < metrics["heldout_loss_before"] / 2


def test_server_and_trainer_agree_in_every_step(made):
    steps = [row for row in document(made["train-vlm"], "history.json") if "mismatch_kl" in row]
    assert len(steps) == 2
    assert all(abs(row["mismatch_kl"]) < 1e-3 for row in steps)
    assert all(row["rollouts/failed"] == 0 and row["images/distinct"] > 1 for row in steps)


def test_each_stage_trains_the_whole_language_model(made):
    for before, after in (("model", "warm-start"), ("warm-start", "train-vlm")):
        old, new = weights(made[before]), weights(made[after])
        assert old.keys() == new.keys()
        blocks = [name for name in old if ".blocks." in name]
        assert blocks and not any(torch.equal(old[name], new[name]) for name in blocks)


def test_evaluation_reports_each_kind_of_game(made):
    metrics = document(made["evaluate"], "metrics.json")
    assert set(metrics["kinds"]) == KINDS
