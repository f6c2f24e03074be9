"""What a request meets on its way, in memory: principals, replicas, configs, a scripted engine, a caller that listens.

For unit tests of decode, routing, fleet, upstream and dispatch; nothing here opens a socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from fakes.bodies import FORM_TYPE, json_fields, transcription

from gateway.admission.account import Ticket
from gateway.admission.slots import Slot
from gateway.config.load import LoadedConfig, parse
from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import UpstreamBroken
from gateway.domain.outcome import Outcome
from gateway.domain.record import AccessRecord
from gateway.domain.replica import Load, ReplicaRecord, ReplicaState
from gateway.domain.request import NO_RATE, InferenceRequest, Limits, Principal, RateState
from gateway.edge.decode import decode
from gateway.upstream.fast_path import FastPath
from gateway.upstream.retry import never_connected
from gateway.upstream.transport import Deadlines, UpstreamRequest

WITHIN_S = 5.0
ALICE = Principal("alice-dev", "alice", "default", ("*",))


def a_record() -> AccessRecord:
    return AccessRecord("req-1", "POST", Endpoint.CHAT.value, "rev", began_s=0.0)


def a_request(
    body: dict[str, Any] | None = None, *, endpoint: Endpoint = Endpoint.CHAT, principal: Principal = ALICE, **more: Any
) -> InferenceRequest:
    """As decoding makes it. `body` is the whole body; without it a small valid one, with `more` fields."""
    if body is None and endpoint.rules.is_form:
        raw = transcription(**{name: str(value) for name, value in more.items()})
        return decode(raw, endpoint, principal, principal.class_name, "req-1", FORM_TYPE)
    raw = json.dumps(json_fields(endpoint, **more) if body is None else body).encode()
    return decode(raw, endpoint, principal, principal.class_name, "req-1")


def replica(
    id_: str = "a/0@h", state: ReplicaState = ReplicaState.READY, *, waiting: int | None = None, **more: Any
) -> ReplicaRecord:
    """A replica of the pool that its id names; served as "<pool>-model"."""
    pool = id_.partition("/")[0]
    load = None if waiting is None else Load(0, waiting, 0.0)
    facts: dict[str, Any] = {
        "url": f"http://{id_}",
        "served_name": f"{pool}-model",
        "max_model_len": 2048,
        "since_s": 0.0,
        "load": load,
    }
    return ReplicaRecord(id=id_, pool=pool, state=state, **{**facts, **more})


def a_config(**sections: Any) -> LoadedConfig:
    """Pool "a", route "chat" on it; `sections` replace or add whole sections."""
    data: dict[str, Any] = {
        "pools": {"a": {"urls": ["http://a"]}},
        "routes": {"chat": {"targets": [{"pool": "a"}]}},
    }
    return _parsed(json.dumps(data | sections))


@lru_cache(maxsize=64)  # reading a config takes longer than most tests that need one
def _parsed(document: str) -> LoadedConfig:
    return parse(json.loads(document), Path("/etc/poolgate/config.toml"))


# --- the engine ---------------------------------------------------------------------------------------------


class Silence:
    """In a script: nothing comes here. Without a connection, as while it is being made."""

    def __init__(self, *, is_connected: bool = True) -> None:
        self.is_connected = is_connected
        self._reached = asyncio.Event()

    async def reached(self) -> None:
        """Returns when somebody waits for what does not come."""
        async with asyncio.timeout(WITHIN_S):
            await self._reached.wait()

    async def wait(self, end: asyncio.Event | None = None) -> None:
        self._reached.set()
        await (end or asyncio.Event()).wait()


Part = bytes | Exception | Silence


class FakeReply:
    """An engine's reply, read by read: bytes, an error to raise, or silence. After the last part comes the end."""

    def __init__(self, *parts: Part, status: int = 200) -> None:
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_closed = False
        self.bytes_read = 0
        self._parts = list(parts)
        self._room = asyncio.Event()
        self._closed = asyncio.Event()
        self.was_held = False  # by a taker that had no room

    @property
    def is_whole(self) -> bool:
        return not self._parts

    async def read(self) -> bytes:
        if not self._parts:
            return b""
        part = self._parts.pop(0)
        if isinstance(part, Exception):
            raise part
        if isinstance(part, Silence):
            await part.wait(self._closed)
            raise UpstreamBroken("The reply was closed before its end.", response_began=True)
        self.bytes_read += len(part)
        return part

    async def read_all(self, limit_bytes: int) -> bytes:
        whole = b""
        while data := await self.read():
            whole += data
            if len(whole) > limit_bytes:
                raise UpstreamBroken("The engine's reply is too long.", response_began=True)
        return whole

    async def relay(self, take: Callable[[bytes], bool], fast: FastPath | None = None) -> None:
        while data := await self.read():
            self._room.clear()
            if not take(data):
                self.was_held = True
                await self._room.wait()

    def resume(self) -> None:
        self._room.set()

    def close(self) -> None:
        self.is_closed = True
        self._closed.set()


class FakeTransport:
    """Answers each `send` with the next of its script: a reply, an error to raise, or silence. Keeps what was sent."""

    def __init__(self, *script: FakeReply | Exception | Silence) -> None:
        self._script = list(script)
        self.sent: list[tuple[str, UpstreamRequest]] = []
        self.deadlines: list[Deadlines] = []

    @property
    def urls(self) -> list[str]:
        return [url for url, _ in self.sent]

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for _, request in self.sent]

    async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> FakeReply:
        self.sent.append((url, request))
        self.deadlines.append(deadlines)
        answer = self._script.pop(0)
        if isinstance(answer, Silence):
            is_connected = answer.is_connected
        else:
            is_connected = not (isinstance(answer, Exception) and never_connected(answer))
        if is_connected and request.on_send is not None:
            request.on_send()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Silence):
            await answer.wait()
        assert isinstance(answer, FakeReply)
        return answer

    async def aclose(self) -> None:
        pass


def event(content: str, finish: str | None = None) -> bytes:
    """One chat event, as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def usage_event(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def plain_answer(prompt: int = 7, completion: int = 3, finish: str = "stop") -> bytes:
    message = {"role": "assistant", "content": "Hello"}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"id": "x", "choices": [choice], "usage": usage}, separators=(",", ":")).encode()


# --- the caller and the gate --------------------------------------------------------------------------------


@dataclass
class FakeCaller:
    """Keeps what it was told. With `log` it notes there when it sees the end of its reply.

    It takes no more after each write while `is_slow`, until `read_on`.
    """

    rate: RateState = NO_RATE
    queue_s: float | None = None
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)
    is_finished: bool = False
    refusal: tuple[Any, ...] | None = None
    log: list[str] = field(default_factory=list)
    fails_at_write: Exception | None = None
    has_started: bool = False
    on_room: Callable[[], None] | None = None
    fast_path: FastPath | None = None
    chunks: asyncio.WriteTransport | None = None  # set: the fast path writes there
    is_slow: bool = False
    comments: tuple[float, dict[bytes, bytes]] | None = None
    is_opened_by_comment: bool = False
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def reply(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        self.start(status, headers)
        self.finish(body)

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert not self.has_started or self.is_opened_by_comment, "a reply starts once"
        if not self.has_started:
            self.has_started, self.status, self.headers = True, status, dict(headers)

    def write(self, data: bytes) -> bool:
        assert data and self.status and not self.is_finished
        if self.fails_at_write is not None:
            raise self.fails_at_write
        if b"[DONE]" in data:
            self.log.append("caller sees the end")
        self.writes.append(data)
        self._room.clear()
        return not self.is_slow

    def finish(self, data: bytes = b"") -> None:
        assert self.status and not self.is_finished
        self.is_finished = True
        self.log.append("caller sees the end")
        if data:
            self.writes.append(data)

    async def drained(self) -> None:
        await self._room.wait()

    def read_on(self) -> None:
        self._room.set()
        if self.on_room is not None:
            self.on_room()

    def refuse(self, status: int, message: str, kind: str, param: str | None, code: str | int | None) -> None:
        self.refusal = (status, message, kind, param, code)
        self.has_started, self.status, self.is_finished = True, status, True

    def open_by_comment(self) -> None:
        """As after a silence: the status is spent."""
        self.start(200, [])
        self.is_opened_by_comment = True

    def comment_every(self, interval_s: float, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.comments = (interval_s, dict(headers))


class FakeTicket:
    """Keeps the outcome that it was settled with, gives its slot back, and notes that in the gate's log."""

    def __init__(self, gate: FakeGate) -> None:
        self.rate = gate.rate
        self.slot: Slot | None = None
        self.outcomes: list[Outcome] = []
        self._gate = gate

    def settle(self, outcome: Outcome) -> None:
        if not self.outcomes:  # a second call is void
            self._gate.log.append("settled")
            if self.slot is not None:
                self.slot.release()
            self.outcomes.append(outcome)


class FakeGate:
    """Admits everybody, or raises what it was given. Keeps the tickets and what they reserved."""

    def __init__(self, refusal: Exception | None = None, rate: RateState = NO_RATE) -> None:
        self.rate = rate
        self.tickets: list[FakeTicket] = []
        self.reserved: list[int] = []
        self.log: list[str] = []
        self._refusal = refusal

    def try_admit(self, principal: Principal, route_name: str, route_limits: Limits, reserve_tokens: int) -> None:
        """Every request has to ask."""

    async def admit(self, principal: Principal, route_name: str, route_limits: Limits, reserve_tokens: int) -> Ticket:
        if self._refusal is not None:
            raise self._refusal
        self.reserved.append(reserve_tokens)
        self.tickets.append(FakeTicket(self))
        return cast(Ticket, self.tickets[-1])


class FixedSource:
    """A source of replicas that says what the test sets; `answer` may be an error to raise."""

    def __init__(self, replicas: Sequence[ReplicaRecord] | Exception, name: str = "fixed") -> None:
        self.name = name
        self.answer: Sequence[ReplicaRecord] | Exception = replicas

    async def replicas(self) -> Sequence[ReplicaRecord]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer
