"""Questions to one engine over HTTP, each with a deadline: does it live, is it ours, does it work. For `worker.py`."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from gateway.domain.replica import Load
from workers.errors import EngineDead, PortTaken, ProbeFailed

PROBE_S = 5.0
TOKEN_S = 120.0  # the first token may include compiling and warming up
LOOPBACK_NAMES = frozenset({"127.0.0.1", "0.0.0.0", "::", "::1", "::ffff:127.0.0.1"})

# What each kind of model serves, as one small request; an engine answers 404 on the paths of other kinds.
_TRIALS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", {"input": "1"}),
    ("/v1/score", {"text_1": "1", "text_2": "1"}),
    ("/classify", {"input": "1"}),
    ("/pooling", {"input": "1"}),
)

# 'vllm:num_requests_running{engine="0",model_name="smollm2"} 0.0'
_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? ([\d.eE+-]+)\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a ready engine says of itself; None where it did not say."""

    max_model_len: int | None
    version: str | None


class Engine:
    """One engine on 127.0.0.1:`port`. Calls raise ProbeFailed unless the answer is that of a healthy engine."""

    def __init__(self, port: int, engine_key: str, served_name: str) -> None:
        self.port = port
        self._served_name = served_name
        self._authorized = {"Authorization": f"Bearer {engine_key}"}
        # trust_env: a proxy of the environment must not come between us and the loopback interface
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PROBE_S, trust_env=False)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def check_health(self) -> None:
        """Raises EngineDead when the server says so. A hung engine passes: the server answers without asking it."""
        reply = await self._send("GET", "/health")
        if reply.status_code == 503:
            raise EngineDead("the engine is dead (/health answers 503)")
        if reply.status_code != 200:
            raise ProbeFailed(f"/health answers HTTP {reply.status_code}")

    async def facts(self) -> EngineFacts:
        """Checks that it is the engine we started (it wants our key, it serves our name), and what it can do."""
        open_to_all = await self._send("GET", "/v1/models")
        if open_to_all.status_code != 401:
            raise ProbeFailed(
                f"port {self.port} answers /v1/models without a key (HTTP {open_to_all.status_code}): not our engine"
            )
        models = _json(await self._get("/v1/models", self._authorized))
        cards = models.get("data") if isinstance(models, dict) else None
        card = next((c for c in cards or [] if isinstance(c, dict) and c.get("id") == self._served_name), None)
        if card is None:
            raise ProbeFailed(f'port {self.port} does not serve "{self._served_name}"')
        window = card.get("max_model_len")
        version = _json(await self._get("/version", self._authorized))
        text = version.get("version") if isinstance(version, dict) else None
        return EngineFacts(window if isinstance(window, int) else None, text if isinstance(text, str) else None)

    async def check_one_token(self) -> None:
        """One real answer of the model. An engine that serves none of the known kinds (speech) passes without one."""
        for path, body in _TRIALS:
            reply = await self._send(
                "POST", path, self._authorized, {"model": self._served_name, **body}, timeout_s=TOKEN_S
            )
            if reply.status_code == 200:
                return
            if reply.status_code not in (404, 405):
                raise ProbeFailed(f"{path} answers HTTP {reply.status_code}: {reply.text[:200]}")

    async def load(self) -> Load | None:
        """None for an engine that does not show these gauges."""
        return load_of((await self._get("/metrics")).text)

    async def _get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        reply = await self._send("GET", path, headers)
        if reply.status_code != 200:
            raise ProbeFailed(f"{path} answers HTTP {reply.status_code}")
        return reply

    async def _send(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
        timeout_s: float = PROBE_S,
    ) -> httpx.Response:
        try:
            return await self._client.request(method, path, headers=headers, json=body, timeout=timeout_s)
        except httpx.HTTPError as exc:
            raise ProbeFailed(f"{path}: {exc or type(exc).__name__}") from exc


def load_of(metrics: str) -> Load | None:
    """Load from the text of /metrics; counts add up over the engines of one server, KV use is that of the fullest."""
    values: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(metrics):
        values.setdefault(name, []).append(float(value))
    if "num_requests_running" not in values:
        return None
    return Load(
        running=round(sum(values["num_requests_running"])),
        waiting=round(sum(values.get("num_requests_waiting", []))),
        kv_use=max(values.get("kv_cache_usage_perc", [0.0])),
    )


def check_port_owner(port: int, pids: Set[int]) -> None:
    """Every listener on 127.0.0.1:`port` must be one of `pids`; blocking.

    Raises PortTaken naming the stranger, ProbeFailed when nobody listens. A stranger beside our own process counts as
    well: with port reuse the kernel would split the requests between the two.
    """
    listeners = {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == port
        and connection.laddr.ip in LOOPBACK_NAMES
    }
    strangers = listeners - pids
    if strangers:
        names = ", ".join(_describe(pid) for pid in sorted(strangers, key=lambda pid: pid or 0))
        raise PortTaken(f"port {port} is taken by {names}")
    if not listeners:
        raise ProbeFailed(f"nobody listens on port {port}")


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"pid {pid}"


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError as exc:
        raise ProbeFailed(f"{reply.url.path} answers something that is not JSON") from exc
