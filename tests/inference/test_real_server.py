"""The pool on real vLLM servers, checked against the transformers model itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from PIL import Image

from armature.components.inference.client import Completion
from armature.components.inference.own_servers import keep_servers, served_files
from armature.components.inference.pool import ServerPool
from armature.components.inference.probe import ProbeAnswer, ask_probe, distance
from armature.components.inference.settings import EvaluationSamplingSettings, SamplingSettings, ServerSettings
from tests.builders import make_machine
from tests.images import image_part, noise
from tests.inference.conftest import make_sampling
from tests.refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
GREEDY = EvaluationSamplingSettings(temperature=0.0, max_tokens=4, top_p=1.0, top_k=0)


COMPILED = "compiled"


class Running:
    """A running pool with one real server, whose model has tied embeddings, and a portal to the pool's event loop."""

    def __init__(self, pool: ServerPool, portal: BlockingPortal, checkpoints: list[Path]) -> None:
        self.pool, self.portal, self.checkpoints = pool, portal, checkpoints

    def call(self, work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        return self.portal.call(work, *arguments)

    def sync(self, checkpoint: Path, version: int, answers_of: Path | None = None) -> None:
        """Sync the pool to `checkpoint`. The trainer's answer to the probe is computed with the weights in
        `answers_of`; None: with `checkpoint` itself."""
        self.call(self.pool.sync, checkpoint, version, None, trainers_answer(self.pool, answers_of or checkpoint))

    def complete(self, image: Image.Image, sampling: Any = GREEDY, seed: int = 0) -> Completion:
        return self.call(self.pool.complete, ask(image), sampling, seed)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    from armature.components.models.tiny import SMALL, make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("real")
    tied = SMALL.model_copy(update={"tie_embeddings": True})
    checkpoints = [make_tiny_checkpoint("qwen2-vl", folder / str(seed), seed, tied) for seed in range(3)]
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(new_pool(checkpoints[0], folder)) as pool:
        yield Running(pool, portal, checkpoints)


def new_pool(checkpoint: Path, folder: Path) -> ServerPool:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / COMPILED)}
    machine = make_machine(servers__python=PYTHON, ready_timeout=400, servers__environment=environment)
    return ServerPool(
        checkpoint,
        ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32"),
        machine,
        folder / "logs",
    )


def trainers_answer(pool: ServerPool, checkpoint: Path) -> ProbeAnswer:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from armature.components.vlm.logprobs import Policy, answer_probe

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="float32")
    policy = Policy(model, logprobs="torch", temperature=0.7, chunk_tokens=16)
    return ProbeAnswer(answer_probe(policy, AutoProcessor.from_pretrained(checkpoint), pool.weights.probe), "float32")


def ask(image: Image.Image) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [image_part(image), {"type": "text", "text": "Which colour is it?"}]}]


def reference_logprobs(
    checkpoint: Path, completion: Completion, image: Image.Image, forbidden: tuple[int, ...], temperature: float
) -> npt.NDArray[np.float32]:
    """Return the log-probs of a completion's tokens, (C,), computed by the transformers model on the token ids that the
    server reported."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    ids = torch.tensor(np.concatenate([completion.prompt_token_ids, completion.token_ids])[None].astype(np.int64))
    features = processor.image_processor(images=[image], return_tensors="pt")
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            **features,
        ).logits[0]
    logits[:, list(forbidden)] = -torch.inf
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    count = completion.token_ids.size
    return logprobs[-count - 1 : -1].gather(1, ids[0, -count:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_server_logprobs_equal_the_model(running, temperature):
    pool, image = running.pool, noise(1)
    sampling = make_sampling(temperature=temperature, max_tokens=12)
    completion = running.complete(image, sampling, seed=5)
    assert (completion.prompt_token_ids == 6).sum() >= 4 or completion.prompt_token_ids.size > 20
    expected = reference_logprobs(running.checkpoints[0], completion, image, pool.forbidden_token_ids, temperature)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-3)
    # With the placeholders left in the softmax the two would differ by the mass that they have.
    naive = reference_logprobs(running.checkpoints[0], completion, image, (), temperature)
    assert np.all(completion.logprobs > naive)


def test_grouped_and_single_requests_get_equal_samples(running):
    sampling = make_sampling(max_tokens=6)
    messages = ask(noise(2))

    async def group() -> list[Completion]:
        jobs = (running.pool.complete(messages, sampling, 100 + member) for member in range(6))
        return list(await asyncio.gather(*jobs))

    requests = running.pool.statistics.requests
    together = running.call(group)
    assert running.pool.statistics.requests == requests + 1
    alone = [running.complete(noise(2), sampling, seed=100 + member) for member in range(6)]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert len({tuple(one.token_ids.tolist()) for one in together}) > 1


def test_forbidden_tokens_are_never_sampled(running):
    # At temperature 2 an untrained model takes every token about as often: some 40 of 3,200 would be placeholders.
    results = running.call(running.pool.sample, ask(noise(3)), make_sampling(temperature=2.0, max_tokens=100), 0, 32)
    sampled = {int(token) for result in results for token in result.token_ids}
    assert len(sampled) > 200
    assert not sampled & set(running.pool.forbidden_token_ids)


def test_cpu_server_compiles_nothing(running):
    """A request would wait 12 s for a C++ compiler."""
    running.complete(noise(4))
    running.complete(noise(4), SamplingSettings(max_tokens=4), 1)
    assert list((running.checkpoints[0].parent / COMPILED).rglob("*.so")) == []


def test_every_server_route_needs_the_key(running):
    url = running.pool.replicas[0].url
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json"):
        assert httpx.get(url + path).status_code == 401, path
    for path in ("/collective_rpc", "/pause", "/tokenize", "/update_weights", "/sleep", "/reset_prefix_cache"):
        assert httpx.post(url + path, json={}).status_code == 401, path


def test_sync_changes_weights_and_clears_caches(running):
    pool, image = running.pool, noise(4)
    before = running.complete(image)
    assert running.complete(image).token_ids.tolist() == before.token_ids.tolist()  # now everything is cached
    running.sync(running.checkpoints[1], 1)
    after = running.complete(image)
    assert (before.policy_version, after.policy_version) == (0, 1)
    expected = reference_logprobs(running.checkpoints[1], after, image, pool.forbidden_token_ids, 0.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=2e-3)
    old = reference_logprobs(running.checkpoints[0], after, image, pool.forbidden_token_ids, 0.0)
    assert np.abs(old - expected).max() > 0.05


def test_in_flight_answer_continues_with_synced_weights(running):
    """Each token has the log-prob of the weights that sampled it: those before up to one token, then the new ones."""
    pool, image, length = running.pool, noise(6), 256
    version = pool.weights.version + 1
    running.sync(running.checkpoints[0], version)
    newer = trainers_answer(pool, running.checkpoints[1])
    retries = pool.statistics.retries

    async def work() -> list[Any]:
        asked = asyncio.create_task(pool.sample(ask(image), SamplingSettings(max_tokens=length), 7, 4))
        # Under load the server may begin a request that was sent earlier later. When it receives the second of these,
        # it has the four answers' request, which then are about as long as the second's answer.
        for _ in range(2):
            await pool.sample(ask(image), SamplingSettings(max_tokens=24), 7, 1)
        pool.weights.in_flight_updates = True
        try:
            await pool.sync(running.checkpoints[1], version + 1, None, newer)
            assert not asked.done()
            return [*await asked, await pool.complete(ask(image), SamplingSettings(max_tokens=8), 7)]
        finally:
            pool.weights.in_flight_updates = False

    *spanning, after = running.call(work)
    assert (pool.statistics.continued, pool.statistics.retries) == (4, retries)
    assert [each.policy_version for each in spanning] == [version] * 4 and after.policy_version == version + 1
    for answer in spanning:
        old, new = (
            reference_logprobs(checkpoint, answer, image, pool.forbidden_token_ids, 1.0)
            for checkpoint in running.checkpoints[:2]
        )
        by_old = int(np.flatnonzero(np.abs(answer.logprobs - old) > 2e-3)[0])
        assert 8 < by_old < len(old) - 8
        np.testing.assert_allclose(answer.logprobs[by_old:], new[by_old:], atol=2e-3)
        assert np.abs(new - old).max() > 0.05
    expected = reference_logprobs(running.checkpoints[1], after, image, pool.forbidden_token_ids, 1.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=2e-3)


@pytest.mark.parametrize("victim", [pytest.param("front", marks=pytest.mark.long), "engine"])
def test_killed_server_returns_and_no_request_is_lost(running, victim):
    pool = running.pool
    version = pool.weights.version + 1
    checkpoint = running.checkpoints[2 if victim == "front" else 1]
    running.sync(checkpoint, version)
    image = noise(5)
    count, before, restarts = 24, pool.statistics.completions, pool.statistics.restarts

    async def work() -> list[Completion]:
        # Seeds that do not follow one another: each is a request of its own. They end one after the other.
        jobs = [
            asyncio.create_task(pool.complete(ask(noise(9 + i)), make_sampling(max_tokens=8 + 5 * i), 3 * i))
            for i in range(count)
        ]
        while pool.statistics.completions == before:  # the first are done, the others are in flight
            await asyncio.sleep(0.01)
        family = pool.replicas[0].server.family()
        process = family[0] if victim == "front" else next(p for p in family if "EngineCore" in " ".join(p.cmdline()))
        os.kill(process.pid, signal.SIGKILL)
        return list(await asyncio.gather(*jobs))

    results = running.call(work)
    assert len(results) == count
    assert pool.statistics.completions == before + count
    assert pool.statistics.restarts == restarts + 1
    assert not pool.statistics.failures
    assert {result.policy_version for result in results} == {version}
    after = running.complete(image)
    expected = reference_logprobs(checkpoint, after, image, pool.forbidden_token_ids, 0.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=2e-3)


def test_server_and_trainer_agree_on_the_probe(running):
    pool = running.pool
    running.sync(running.checkpoints[1], pool.weights.version + 1)
    answer = running.call(ask_probe, pool.http, pool.replicas[0].endpoint, pool.weights.probe)
    assert distance(answer, trainers_answer(pool, running.checkpoints[1]).logprobs) < 1e-5
    # Last: no sync is possible after one that failed.
    with refused("served_weights_differ"):
        running.sync(running.checkpoints[2], pool.weights.version + 1, answers_of=running.checkpoints[0])


@pytest.mark.long
def test_reused_server_gets_the_weights_of_the_next_pool(running, tmp_path):
    image, seen = noise(3), []

    async def complete(checkpoint: Path, then: Exception | None = None) -> Completion:
        async with new_pool(checkpoint, tmp_path) as pool:
            server = pool.replicas[0].server
            seen.append(server)
            if then is not None:
                raise then
            return await pool.complete(ask(image), SamplingSettings(max_tokens=8), 5)

    with keep_servers():
        for checkpoint in running.checkpoints[:2]:
            completion = asyncio.run(complete(checkpoint))
            forbidden = running.pool.forbidden_token_ids
            expected = reference_logprobs(checkpoint, completion, image, forbidden, 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-3)
        assert seen[0] is seen[1] and seen[0].alive
        with pytest.raises(RuntimeError):
            asyncio.run(complete(running.checkpoints[0], RuntimeError("the stage failed")))
        assert seen[2] is seen[0] and not seen[0].alive
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_resaved_processor_is_served_alike(running, tmp_path):
    from transformers import AutoProcessor

    first = running.checkpoints[0]
    processor = AutoProcessor.from_pretrained(first)
    processor.tokenizer(["one", "and two"], padding=True, truncation=True, max_length=2)
    other = Path(shutil.copytree(first, tmp_path / "other"))
    processor.save_pretrained(other)
    assert (first / "tokenizer_config.json").read_bytes() != (other / "tokenizer_config.json").read_bytes()
    assert served_files(first) == served_files(other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert served_files(first) != served_files(other)
