"""One completion from slot to last byte, with its faults; `api.py` makes one of these per accepted job."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Final, NoReturn

from workers.fake_engine.answers import ENGINE_DEAD, compact
from workers.fake_engine.checks import Job
from workers.fake_engine.engine import Engine
from workers.fake_engine.kinds import Kind
from workers.fake_engine.options import Options
from workers.fake_engine.wire import Headers, Reply

_JSON: Final = ("content-type", "application/json")
_SSE: Final = ("content-type", "text/event-stream; charset=utf-8")
_ARRIVAL_S: Final = 0.02  # for the last bytes to be read before the process or the connection is gone


class EngineDied(Exception):
    """This job took the engine core with it; its own answer is complete."""


class _Over(Exception):
    """The fault's end was reached; nothing more is sent."""


class Run:
    """State of one job. `run` is cancelled when the client leaves, or by `Engine.stop_jobs`."""

    def __init__(
        self, options: Options, engine: Engine, reply: Reply, headers: Headers, job: Job, kind: Kind, name: str
    ) -> None:
        self._options = options
        self._engine = engine
        self._reply = reply
        self._headers = headers
        self._job = job
        self._kind = kind
        self._id = kind.prefix + (job.request_id or name or secrets.token_hex(8))
        self._events = kind.events(job, self._id, options) if job.stream and kind.events is not None else None
        self._at = [0] * len(job.choices)  # tokens sent of each choice
        self._sent = 0  # events of the stream
        self._started = False  # headers are out
        fault = job.fault
        self._ttft_s = options.ttft_s if fault.ttft_ms is None else fault.ttft_ms / 1000
        self._itl_s = options.itl_s if fault.itl_ms is None else fault.itl_ms / 1000
        reply.byte_by_byte, reply.chunk_bytes = fault.byte_by_byte, fault.chunk_bytes

    async def run(self) -> None:
        """Answers the job; raises EngineDied for the process to end."""
        try:
            await self._answer()
        except _Over:
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._reply.client_left or self._engine.stop_mode is None or task is None:
                self._engine.aborted += 1
                raise
            task.uncancel()
            await self._stopped(self._engine.stop_mode)

    async def _answer(self) -> None:
        fault = self._job.fault
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.status is not None:
            return await self._refuse(fault.status)
        if fault.no_headers and fault.end:
            await self._end(fault.end)
        if self._events is not None:
            await self._start()
        if self._engine.hangs:
            await self._reply.silence()
        await self._engine.acquire(self._job.priority)
        self._engine.prompt_tokens += self._job.prompt_tokens
        self._engine.kv_tokens += self._job.prompt_tokens
        try:
            if self._ttft_s:
                await asyncio.sleep(self._ttft_s)
            await (self._stream() if self._events is not None else self._plain())
            self._engine.finished[self._job.finish] += 1
        finally:
            self._engine.kv_tokens -= self._job.prompt_tokens + sum(self._at)
            self._engine.release()

    async def _refuse(self, status: int) -> None:
        fault = self._job.fault
        error = {"message": fault.message, "type": "BadRequestError" if status < 500 else "InternalServerError",
                 "param": None, "code": status}  # fmt: skip
        body = compact({"error": error}) if fault.body is None else fault.body.encode()
        retry = [] if fault.retry_after is None else [("retry-after", str(fault.retry_after))]
        await self._reply.whole(
            status, [("content-type", fault.content_type), *retry, *self._headers], body.ljust(fault.body_bytes)
        )

    async def _start(self) -> None:
        self._started = True
        await self._reply.start(200, [_SSE, *self._headers])

    async def _stream(self) -> None:
        job, fault, events = self._job, self._job.fault, self._events
        assert events is not None
        for event in events.opening():
            await self._event(event)
        for step in range(max(1, *map(len, job.choices))):
            for choice, tokens in enumerate(job.choices):
                if step >= max(1, len(tokens)):
                    continue
                piece = tokens[step] if tokens else ""
                self._count(choice)
                if step + 1 < len(tokens) or fault.no_finish:
                    await self._event(events.token(choice, piece))
                else:
                    await self._event(events.last(choice, piece, job.finish))
            if self._itl_s:
                await asyncio.sleep(self._itl_s)
            elif step % 16 == 15:
                await asyncio.sleep(0)  # the loop must see a client that leaves
        for event in events.closing():
            await self._event(event)
        if fault.end:
            await self._end(fault.end)
        if not fault.no_done:
            await self._reply.chunk(events.done())
        await self._reply.finish()

    async def _event(self, data: bytes) -> None:
        fault = self._job.fault
        if fault.end and self._sent == fault.after:
            await self._end(fault.end)
        self._sent += 1
        await self._reply.chunk(data)

    def _count(self, choice: int, tokens: int = 1) -> None:
        self._at[choice] += tokens
        self._engine.generation_tokens += tokens
        self._engine.kv_tokens += tokens

    async def _plain(self) -> None:
        longest = max(map(len, self._job.choices), default=0)
        for step in range(0, longest, 1 if self._itl_s else max(1, longest)):
            for choice, tokens in enumerate(self._job.choices):
                self._count(choice, len(tokens[step : step + (1 if self._itl_s else longest)]))
            if self._itl_s:
                await asyncio.sleep(self._itl_s)
        fault = self._job.fault
        if fault.end is not None:
            if fault.end not in ("error_event", "engine_dead") and (fault.after or fault.headers_only):
                await self._whole(share=0.5 if fault.after else 0.0)
            await self._end(fault.end)
        await self._whole()

    async def _whole(self, share: float = 1.0) -> None:
        body = self._kind.whole(self._job, self._id, self._options)
        await self._reply.whole(200, [_JSON, *self._headers], body, share)

    async def _end(self, end: str) -> NoReturn:
        """The bad end that the fault asks for."""
        if end == "die":
            await self._reply.flush()
            await asyncio.sleep(_ARRIVAL_S)
            os._exit(self._job.fault.exit_code)
        if end == "engine_dead":
            self._engine.dead = True
            own = asyncio.current_task()
            self._engine.stop_jobs("error", except_for=own)
            await self._error()
            raise EngineDied
        if end == "reset":
            await self._reply.flush()
            await asyncio.sleep(_ARRIVAL_S)
            await self._reply.reset()
        elif end == "stall":
            await self._reply.silence()
        elif end == "error_event":
            await self._error()
        elif end == "close" and self._started:
            await self._reply.finish()
        else:
            await self._reply.cut()
        raise _Over

    async def _error(self) -> None:
        """vLLM's words for a dead engine core, as an event where the headers are out, else as a 500."""
        if not self._started:
            await self._reply.whole(500, [_JSON, *self._headers], compact(ENGINE_DEAD))
            return
        failed = self._events.failed() if self._events is not None else None
        if failed is None:
            await self._reply.cut()
            return
        await self._reply.chunk(failed)
        await self._reply.finish()

    async def _stopped(self, mode: str) -> None:
        """The three ways in which requests in flight end at SIGTERM."""
        if mode == "hang":
            try:
                await self._reply.silence()
            finally:
                self._engine.aborted += 1
        if mode == "error":
            await self._error()
            return
        self._job.finish = "abort"
        self._engine.finished["abort"] += 1
        if self._events is None:
            self._job.choices = [tokens[:sent] for tokens, sent in zip(self._job.choices, self._at, strict=True)]
            await self._whole()
            return
        if not self._started:
            await self._start()
        for choice, tokens in enumerate(self._job.choices):
            if self._at[choice] < max(1, len(tokens)):
                await self._reply.chunk(self._events.last(choice, "", "abort"))
        for event in self._events.closing():
            await self._reply.chunk(event)
        await self._reply.chunk(self._events.done())
        await self._reply.finish()
