"""One vLLM server that the run starts itself: its start, its readiness, and the reason when it fails."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import httpx
import psutil

from armature.components.contracts.errors import ServerError
from armature.components.contracts.installation import SERVED
from armature.components.contracts.machine import Machine
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.command import ServedAdapters, is_deterministic, server_command, server_environment
from armature.components.inference.host import Host, LocalHost, ServerNeeds
from armature.components.inference.replies import BadReply, Endpoint, exchange
from armature.components.inference.settings import ServerSettings

_POLL = 0.25
_SHOWN, _SEARCHED = 30, 10_000
"""Number of lines at the end of a log: those that an error shows, and those in which its cause is searched."""
_HEALTH_TIMEOUT = 10.0


class VllmServer:
    """A vLLM server whose processes end with this process. Each start writes a log file of its own.

    Args:
        index: position among the pool's servers; it selects GPUs, port and the name of the log files.
        log_folder: folder for `vllm-<index>-<attempt>.log`.
        api_key: key that all routes except the liveness check require.
        adapters: the LoRA adapters that the server can load, if any.
        host: machine that the server runs on; None: this machine.
    """

    def __init__(
        self,
        settings: ServerSettings,
        machine: Machine,
        *,
        index: int,
        log_folder: Path,
        api_key: str,
        adapters: ServedAdapters | None = None,
        host: Host | None = None,
    ) -> None:
        self.settings, self.machine, self.index, self.adapters = settings, machine, index, adapters
        self.log_folder, self.api_key = log_folder, api_key
        self.gpus = machine.gpus_of_server(index)
        self.url = ""
        self.log: Path | None = None
        """Log file of the latest start, on the server's machine."""
        self._host = host or LocalHost()

    @property
    def name(self) -> str:
        """Name of the server in logs and messages."""
        return f"vllm-{self.index}"

    @property
    def port(self) -> int:
        """Port that the server listens on, after `start`."""
        return int(self.url.rpartition(":")[2])

    @property
    def alive(self) -> bool:
        """True if the server's process runs."""
        return self._host.alive

    def family(self) -> list[psutil.Process]:
        """Return the server's process and then its child processes; [] if they run on another machine."""
        return self._host.family()

    @property
    def activity(self) -> str:
        """Last line of the server's log, shortened: what the server does while it starts."""
        return _PREFIX.sub("", self.tail(1))[:_ACTIVITY]

    def tail(self, lines: int = 30) -> str:
        """Return the last `lines` lines of the server's log."""
        return self._host.tail(lines)

    async def start(self, model: Path) -> None:
        """Start serving the checkpoint folder `model`, and return when the server answers.

        Raises:
            ServerError: it cannot start, dies, or is not ready after `machine.limits.ready_timeout` seconds. The
                message has the last lines of its log and, for known causes, what to do.
            ConfigurationError: no node of the cluster has room for it, or its settings are impossible.
        """
        await self.stop()
        environment = server_environment(
            self.machine,
            api_key=self.api_key,
            gpus=self.gpus,
            deterministic=is_deterministic(self.settings, self.machine),
            adapters=self.adapters,
        )
        try:
            address, port = await asyncio.to_thread(self._host.prepare, self._needs(model, environment))
            self.url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
            command = server_command(
                model,
                self.settings,
                self.machine,
                port=port,
                gpus=self.gpus,
                adapters=self.adapters,
                address=address,
            )
            attempt = len(list(self.log_folder.glob(f"{self.name}-*.log")))
            self.log = self.log_folder / f"{self.name}-{attempt}.log"
            await asyncio.to_thread(self._host.start, command, self.log, environment)
            await self._wait_ready(model)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server and all its processes."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the server and all its processes, as `stop` does, but block until they have ended."""
        self._host.stop()

    async def _wait_ready(self, model: Path) -> None:
        began, endpoint = time.monotonic(), Endpoint(self.url, self.api_key)
        async with httpx.AsyncClient(trust_env=False) as http:
            while reason := await fault(http, endpoint, model):
                waited = time.monotonic() - began
                if not self.alive:
                    raise self._failure(f"ended {self._host.ending} before it was ready", "server_ended")
                if waited > self.machine.limits.ready_timeout:
                    raise self._failure(f"was not ready after {waited:.0f} s ({reason})", "server_not_ready")
                await asyncio.sleep(_POLL)

    def _failure(self, what: str, code: str) -> ServerError:
        """Return the error for a start that failed, with the cause in the log, or the log's end if it has none."""
        log = self.tail(_SEARCHED)
        cause = cause_of(log)
        last = "\n".join(log.splitlines()[-_SHOWN:])
        remedy = next((hint for pattern, hint in _HINTS if re.search(pattern, cause or log)), "read the log")
        if "{memory}" in remedy:
            remedy = remedy.replace("{memory}", f"{self._host.free_gib():.1f} GiB of main memory are free")
        shown = f": {cause}" if cause else f"; its last lines:\n{last}"
        return ServerError(f"the vLLM server {what}{shown}", code=code, where=str(self.log), remedy=remedy)

    def _needs(self, model: Path, environment: Mapping[str, str | None]) -> ServerNeeds:
        cache = None if self.gpus else float(environment["VLLM_CPU_KVCACHE_SPACE"] or 0)
        wanted = self.machine.servers.arguments.get("port")
        port = None if wanted is None else int(wanted) + self.index
        python = str(self.machine.server_interpreter)
        return ServerNeeds(self.name, python, str(model), cache, port)


async def fault(http: httpx.AsyncClient, endpoint: Endpoint, model: Path | None = None) -> str:
    """Return why the server cannot answer requests; "" if it is healthy and serves the model name `policy`.

    It asks two routes, because /health answers 200 even if the engine cannot answer requests, and does not check the
    key.

    Args:
        model: the checkpoint folder that the server must serve; None: any.

    Raises:
        ServerError: the server rejects the key, or a joined server serves another model. Waiting would not help.
    """
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT):
            health = await exchange(http, "GET", f"{endpoint.url}/health", endpoint.headers)
            if health.status != 200:
                return f"/health answers {health.status}"
            models = await exchange(http, "GET", f"{endpoint.url}/v1/models", endpoint.headers)
    except TimeoutError:
        return f"no answer in {_HEALTH_TIMEOUT:g} s"
    except (httpx.TransportError, httpx.InvalidURL, OSError, BadReply) as error:
        return f"{type(error).__name__}: {error}"
    if models.status in (401, 403):
        raise ServerError(
            f"the server rejects the key: /v1/models answers {models.status}",
            code="server_key_refused",
            where=endpoint.url,
            remedy="set VLLM_API_KEY of the run to the server's key, or check that no other program has its port",
        )
    if models.status != 200:
        return f"/v1/models answers {models.status}: {models.text}"
    try:
        served = {str(entry["id"]): entry.get("root") for entry in models.document["data"]}
    except (BadReply, LookupError, TypeError, AttributeError):
        return f"/v1/models answers with no list of models: {models.text}"
    if MODEL_NAME not in served and model is None:
        raise ServerError(
            f"the server serves {', '.join(sorted(served)[:5])}, not {MODEL_NAME!r}: it was not started for training",
            code="server_not_for_training",
            where=endpoint.url,
            remedy=f"`armature serve {next(iter(served.values()), None) or 'MODEL'}`, or {_PLAIN}",
        )
    if MODEL_NAME not in served:
        return f"it serves {sorted(served)[:5]}, not {MODEL_NAME!r}"
    if model is not None and served[MODEL_NAME] != str(model):
        return f"it serves {str(served[MODEL_NAME])[:300]}, not {model}"
    return ""


_PREFIX = re.compile(r"(\(\w+ pid=\d+\) )?(?:([A-Z]+) [\d-]+ [\d:.]+ \[[^\]]*\] )?")
"""Prefix of a line in vLLM's log: process, level, time and source. Lines of tracebacks on stderr may have none."""
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("The above exception was the direct cause of", "During handling of the above exception")
_LONGEST_CAUSE, _ACTIVITY = 1000, 80


def cause_of(log: str) -> str:
    """Return the exception that ended the first process of a server, with its message. Without one, return "".

    The processes above it fail too, and their exceptions only refer to it: a worker's exception ends its engine, and
    the engine's ends the API server. Tracebacks that vLLM logs as warnings do not count.

    Example:
        >>> lines = [
        ...     "(EngineCore pid=7) ERROR 11-29 13:00:00 [core.py:99] Traceback (most recent call last):",
        ...     "(EngineCore pid=7) ERROR 11-29 13:00:00 [core.py:99] ValueError: no room",
        ...     "Traceback (most recent call last):",
        ...     "RuntimeError: Engine core initialization failed. See root cause above.",
        ... ]
        >>> cause_of(chr(10).join(lines))
        'ValueError: no room'
    """
    matches = [(match, line[match.end() :]) for line in log.splitlines() if (match := _PREFIX.match(line))]
    lines = [(match[1], text) for match, text in matches if match[2] in (None, "ERROR", "CRITICAL")]
    for number, (process, text) in enumerate(lines):
        if text != _TRACEBACK:
            continue
        of_process = [text for other, text in lines[number + 1 :] if other == process and text.strip(" ~^")]
        # The lines of a traceback are indented. The exception follows, and then further lines of its message.
        frames = list(takewhile(lambda text: text[0] == " ", of_process))
        cause, *following = [*of_process[len(frames) :], "", ""][:2]
        if not re.match(r"[A-Za-z_][\w.]*(: |$)", cause) or "root cause" in cause or following[0].startswith(_CHAINED):
            continue
        if ": " not in cause and frames:  # such as a failed assertion: its code is the message
            cause += f": {frames[-1].strip()}"
        elif following[0].startswith(" "):  # the message of pydantic begins there
            cause += f": {following[0].partition(' [type=')[0].strip()}"
        return cause[:_LONGEST_CAUSE]
    return ""


_PLAIN = (
    f"start vLLM with VLLM_SERVER_DEV_MODE=1, --served-model-name {MODEL_NAME}, --logprobs-mode processed_logprobs, "
    "--generation-config vllm and a key in VLLM_API_KEY"
)
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"Error in memory profiling|is less than desired GPU memory utilization",
        "another process uses this GPU: end it, or choose other GPUs in machine.servers.gpus, or lower "
        "machine.servers.arguments.gpu_memory_utilization; then start the run again",
    ),
    (
        r"No module named '?ray",
        "vLLM's CUDA IPC imports ray: install it beside vLLM, or set machine.servers.weight_transfer to "
        '"nccl" or "file"',
    ),
    (
        r"No module named '?armature_served",
        "our package for vLLM is not installed in machine.servers.python; install it there: "
        f"pip install --no-deps {SERVED}",
    ),
    (
        r"attention on CPU is causal inside images",
        'train and serve the checkpoint causal (model.image_attention = "causal"), or serve it on a GPU',
    ),
    (
        r"does not support LoRA",
        'this vLLM cannot serve adapters of this family: set model.lora.served_as = "merged"',
    ),
    (
        r"No module named '?vllm",
        "vLLM is not installed in machine.servers.python; make its environment: armature setup",
    ),
    (
        r"VLLM_CPU_KVCACHE_SPACE|KV cache is needed|No available memory for the cache blocks",
        "the KV cache does not fit ({memory}): set machine.servers.environment.VLLM_CPU_KVCACHE_SPACE (GiB) or "
        "machine.servers.arguments.gpu_memory_utilization, or lower inference.max_model_len",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|Cannot allocate memory|MemoryError",
        "it ran out of memory ({memory}): lower machine.servers.arguments.gpu_memory_utilization, serve fewer "
        "servers, or free memory",
    ),
    (
        r"greater than the derived max_model_len",
        "the model has no positions for so many tokens: lower inference.max_model_len",
    ),
    (r"[Aa]ddress already in use", "another program took the port: start the run again"),
    (
        r"are not supported for now|does not recognize this architecture|is not supported by vLLM|No model class",
        "this vLLM cannot serve this model type; choose another family or another vLLM",
    ),
    (r"unrecognized arguments", "this vLLM does not know one of machine.servers.arguments"),
    (r"head_size|[Hh]ead size", "this head size has no attention kernel on CPU; use 32, 64, 80, 96, 112 or 128"),
)
