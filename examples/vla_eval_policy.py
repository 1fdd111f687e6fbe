"""A policy of `armature serve-policy` for the benchmarks of vla-eval: a model server of theirs that asks ours.

`python examples/vla_eval_policy.py --args.url ws://127.0.0.1:8000 --address 127.0.0.1:8001` runs where vla-eval is
installed, without Armature, and takes the key from ARMATURE_POLICY_KEY. Benchmarks then ask ws://127.0.0.1:8001. They
have to send the state (`send_state: true`), and for a policy with two cameras the other one (`send_wrist_image: true`).
"""

import json
import os
from hashlib import sha256
from typing import Any

import msgpack
import numpy as np
from vla_eval.model_servers.base import SessionContext
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import run_server
from vla_eval.specs import GRIPPER_CLOSE_POS, IMAGE_RGB, LANGUAGE, POSITION_DELTA, ROTATION_AA, DimSpec
from websockets.sync.client import ClientConnection, connect


def pack(array: Any) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def unpack(packed: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in packed:
        return packed
    return np.frombuffer(packed[b"data"], packed[b"dtype"]).reshape(packed[b"shape"])


class ArmaturePolicy(PredictModelServer):
    """The benchmark's cameras, in its order, are the policy's, in the policy's order.

    The noise of an answer follows from the task, the number of the episode and the step, so results depend neither on
    shards nor on batches. What comes back is a chunk; `chunk_size` of it is carried out.
    """

    def __init__(self, url: str, max_batch_size: int = 8) -> None:
        self._url = url
        self._connections: dict[str, ClientConnection] = {}
        self._episodes: dict[str, Any] = {}
        with self._connect() as server:
            self._metadata = msgpack.unpackb(server.recv())
        fields = {name: each for name, each in self._metadata["observation"].items() if "shape" in each}
        required = {name: each for name, each in fields.items() if "optional" not in each}
        self._cameras = [name for name, each in required.items() if each["dtype"] == "uint8"]
        (self._state,) = [name for name, each in required.items() if each["dtype"] == "float32"]
        steps, _ = self._metadata["actions"]["shape"]
        super().__init__(chunk_size=steps, max_batch_size=max_batch_size)

    async def on_episode_start(self, config: dict[str, Any], ctx: SessionContext) -> None:
        await super().on_episode_start(config, ctx)
        self._episodes[ctx.session_id] = config["task"]

    def predict_batch(
        self, obs_batch: list[dict[str, Any]], ctx_batch: list[SessionContext]
    ) -> list[dict[str, np.ndarray]]:
        """All are asked before the first answer is waited for: the server answers them together."""
        asked = []
        for seen, session in zip(obs_batch, ctx_batch, strict=True):
            server = self._connection(session.session_id)
            server.send(msgpack.packb(self._observation(seen, session), default=pack))
            asked.append(server)
        return [{"actions": self._answer(server)} for server in asked]

    def _observation(self, seen: dict[str, Any], session: SessionContext) -> dict[str, Any]:
        episode = json.dumps([self._episodes[session.session_id], session.step], sort_keys=True)
        images = dict(zip(self._cameras, seen["images"].values(), strict=True))
        state = np.asarray(seen["states" if "states" in seen else "state"], np.float32)
        seed = int.from_bytes(sha256(episode.encode()).digest()[:4], "big")
        return {**images, self._state: state, "prompt": seen["task_description"], "seed": seed}

    def _answer(self, server: ClientConnection) -> np.ndarray:
        if isinstance(answer := server.recv(), str):
            raise ValueError(answer)  # what is wrong with the observation
        actions: np.ndarray = msgpack.unpackb(answer, object_hook=unpack)["actions"]
        return actions

    def _connection(self, session: str) -> ClientConnection:
        if session not in self._connections:
            server = self._connections[session] = self._connect()
            server.recv()  # the metadata again
        return self._connections[session]

    def _connect(self) -> ClientConnection:
        headers = {"Authorization": f"Api-Key {os.environ['ARMATURE_POLICY_KEY']}"}
        return connect(self._url, additional_headers=headers, compression=None, max_size=None)

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {**dict.fromkeys(("agentview", "wrist")[: len(self._cameras)], IMAGE_RGB), "language": LANGUAGE}

    def get_action_spec(self) -> dict[str, DimSpec]:
        return {"position": POSITION_DELTA, "rotation": ROTATION_AA, "gripper": GRIPPER_CLOSE_POS}


if __name__ == "__main__":
    run_server(ArmaturePolicy)
