"""One start of one worker: spawn, wait until ready, watch, and end it so that nothing is left. Run by `worker.py`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, wait_fixed

from gateway.domain.replica import ReplicaState
from workers import proc
from workers.command import Launch, launch_of
from workers.errors import EngineDead, PortTaken, ProbeFailed
from workers.gpu import GpuDesk
from workers.health import Engine, EngineFacts, check_port_owner
from workers.leftovers import WorkerRecord
from workers.log_lines import cause_of
from workers.ports import internal_port
from workers.process import Child
from workers.spec import WorkerSpec

T = TypeVar("T")

READY_POLL_S = 0.5
WATCH_S = 1.0
MAX_STRIKES = 6  # unanswered probes in a row before a worker counts as dead; each waits up to health.PROBE_S
FAMILY_EVERY = 5  # looks at the process tree, in rounds of WATCH_S
FLUSH_S = 3.0
CANCEL_AGAIN_S = 1.0
ARGPARSE_STATUS = 2  # vLLM does not know an option or its value: the same start cannot succeed


class Board(Protocol):
    """Where states are published; `publish.Publisher` is one."""

    def changed(self) -> None:
        """A record changed: publish soon."""

    async def flush(self) -> bool:
        """Publishes what is now; False when it could not. Ends by itself."""


class PortSource(Protocol):
    def take(self) -> int: ...
    def release(self, port: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker gets from its supervisor. `slot` is its number on the host; times in seconds."""

    slot: int
    ports: PortSource
    gpus: GpuDesk
    temp_folder: Path
    parent_env: Mapping[str, str]
    drain_s: float  # longest wait for requests in flight at a stop
    settle_s: float  # from the publication of "draining" until gateways have read it


@dataclass(frozen=True, slots=True)
class End:
    """How a start ended that nobody asked to end."""

    cause: str
    was_ready: bool
    is_final: bool = False  # the same start cannot succeed, or must not be tried


class Life:
    """Used once. `enter` changes the worker's state and `update` its facts; both are the worker's own."""

    def __init__(
        self,
        spec: WorkerSpec,
        surroundings: Surroundings,
        board: Board,
        enter: Callable[[ReplicaState, str], None],
        update: Callable[..., None],
        stop: asyncio.Event,
        hurry: asyncio.Event,
    ) -> None:
        self._spec = spec
        self._around = surroundings
        self._board = board
        self._enter = enter
        self._update = update
        self._stop = stop
        self._hurry = hurry
        self._key = secrets.token_urlsafe(32)
        self._was_ready = False
        self._is_loading = True
        self._phase = "importing"
        self._last_probe = ""

    async def run(self) -> End | None:
        """None: a stop was asked for. Raises StartRefused, GpuBusy. No process of this start is left afterwards."""
        async with contextlib.AsyncExitStack() as turn:
            self._enter(
                ReplicaState.STARTING, f"waiting for GPU {', '.join(self._spec.gpus)}" if self._spec.gpus else ""
            )
            if not await self._unless_stopped(self._take_turn(turn)):
                return None
            port = self._around.ports.take()
            turn_over = turn.pop_all()  # the port outlives the turn on the GPU
            try:
                return await self._on_port(port, turn_over)
            finally:
                self._around.ports.release(port)
                await turn_over.aclose()

    async def _take_turn(self, turn: contextlib.AsyncExitStack) -> bool:
        await turn.enter_async_context(self._around.gpus.hold(self._spec.gpus))
        await self._around.gpus.wait_for_memory(self._spec.gpus, self._spec.memory_share)
        return True

    async def _on_port(self, port: int, turn: contextlib.AsyncExitStack) -> End | None:
        launch = launch_of(
            self._spec,
            port=port,
            internal_port=internal_port(self._around.slot),
            engine_key=self._key,
            nonce=secrets.token_hex(6),
            temp_folder=self._around.temp_folder,
            parent_env=self._around.parent_env,
        )
        record = WorkerRecord(self._spec.id, launch.mark, port, str(launch.run_folder), proc.boot_id())
        record.write(self._spec.record_path)  # before the spawn: the mark alone already finds the child
        left: list[int] = []
        try:
            child = await Child.spawn(launch, self._spec.log_path, self._on_phase)
            self._note_phase(self._phase)
            self._update(url=f"http://127.0.0.1:{port}", pid=child.identity.pid, api_key=self._key)
            try:
                await self._save(child, launch, port)
                end = await self._until_end(child, launch, port, turn)
            finally:
                left = await _to_its_end(self._bury(child))
        finally:
            if not left:
                self._spec.record_path.unlink(missing_ok=True)
        if left:
            return End(f"pids {left} of this worker cannot be killed", self._was_ready, is_final=True)
        if isinstance(end, int):
            return End(self._exit_cause(end, child), self._was_ready, end == ARGPARSE_STATUS and not self._was_ready)
        return end

    async def _until_end(
        self, child: Child, launch: Launch, port: int, turn: contextlib.AsyncExitStack
    ) -> End | int | None:
        """The first of: the process exits (its status), a watcher's verdict (an End), a stop (None)."""
        exited = asyncio.create_task(child.wait())
        watched = asyncio.create_task(self._watch(child, launch, port, turn))
        stopped = asyncio.create_task(self._stop.wait())
        tasks = {exited, watched, stopped}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await end_task(watched)
                await self._leave(port)
                return None
            end = exited.result() if exited.done() else watched.result()
            # out of rotation before the cleaning up, which may take seconds; the cause is known after it
            self._enter(ReplicaState.BACKOFF, "died, ending what is left of it")
            return end
        finally:
            for task in tasks:
                await end_task(task)

    async def _watch(self, child: Child, launch: Launch, port: int, turn: contextlib.AsyncExitStack) -> End:
        engine = Engine(port, self._key, self._spec.served_name)
        try:
            try:
                async with asyncio.timeout(self._spec.load_s):
                    facts = await self._until_ready(child, engine, port)
            except TimeoutError:
                return End(
                    f"not ready after {self._spec.load_s:g} s (last phase: {self._phase}; {self._last_probe}); "
                    "raise workers.load_s if it only needs longer",
                    was_ready=False,
                )
            except PortTaken as exc:
                return End(exc.message, was_ready=False)
            await self._save(child, launch, port)
            await turn.aclose()
            self._was_ready, self._is_loading = True, False
            child.log.forget_causes()
            self._update(max_model_len=facts.max_model_len, engine_version=facts.version, load=await _load(engine))
            self._enter(ReplicaState.READY, "")
            return await self._watch_ready(child, launch, engine, port)
        finally:
            await engine.aclose()

    async def _until_ready(self, child: Child, engine: Engine, port: int) -> EngineFacts:
        """Ready: our own child has the port to itself, /health, the expected model under our key, one real token.

        Raises PortTaken. The deadline is the caller's.
        """
        is_warming = False
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ProbeFailed), wait=wait_fixed(READY_POLL_S), reraise=True
        )
        async for attempt in retrying:
            with attempt:
                try:
                    await engine.check_health()
                    pids = {identity.pid for identity in await child.note_family()}
                    await asyncio.to_thread(check_port_owner, port, pids)
                    if not is_warming:
                        is_warming = True
                        self._is_loading = False
                        self._enter(ReplicaState.WARMING, "first token")
                    facts = await engine.facts()
                    await engine.check_one_token()
                except ProbeFailed as exc:
                    self._last_probe = exc.message
                    raise
        return facts

    async def _watch_ready(self, child: Child, launch: Launch, engine: Engine, port: int) -> End:
        strikes = rounds = 0
        while True:
            await asyncio.sleep(WATCH_S)
            rounds += 1
            try:
                await engine.check_health()
                self._update(load=await _load(engine))
                strikes = 0
            except EngineDead as exc:
                return End(exc.message, was_ready=True)
            except ProbeFailed as exc:
                strikes += 1
                self._update(load=None)
                if strikes >= MAX_STRIKES:
                    return End(f"{strikes} probes in a row failed: {exc.message}", was_ready=True)
            if rounds % FAMILY_EVERY == 0:
                await self._save(child, launch, port)

    async def _leave(self, port: int) -> None:
        """Out of rotation: told to the gateways, then time for what is in flight, bounded by `drain_s`."""
        self._is_loading = False
        self._enter(ReplicaState.DRAINING, "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                is_known = await self._board.flush()
        if not self._was_ready or self._hurry.is_set():
            return
        engine = Engine(port, self._key, self._spec.served_name)
        idle = asyncio.create_task(self._until_idle(engine, self._around.settle_s if is_known else 0.0))
        hurried = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({idle, hurried}, timeout=self._around.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_task(idle)
            await end_task(hurried)
            await engine.aclose()

    async def _until_idle(self, engine: Engine, settle_s: float) -> None:
        await asyncio.sleep(settle_s)
        while (load := await _load(engine)) is not None and load.running + load.waiting > 0:
            self._update(load=load, detail=f"{load.running + load.waiting} requests in flight")
            await asyncio.sleep(0.2)

    async def _bury(self, child: Child) -> list[int]:
        """Ends whatever is left of the process tree and cleans up after it; returns the pids that would not die."""
        left = await child.stop(self._spec.stop_s) if self._stop.is_set() else await child.kill()
        await child.close()
        return left

    async def _save(self, child: Child, launch: Launch, port: int) -> None:
        """The record of this start, with the processes of this moment."""
        seen = tuple(sorted(await child.note_family()))
        root = child.identity
        record = WorkerRecord(
            self._spec.id,
            launch.mark,
            port,
            str(launch.run_folder),
            proc.boot_id(),
            root.pid,
            root.start_ticks,
            seen or (root,),
        )
        await asyncio.to_thread(record.write, self._spec.record_path)

    def _exit_cause(self, status: int, child: Child) -> str:
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        if status == 0:
            how += ", which nobody asked for"
        cause = cause_of(child.log.lines())
        return f"{cause} ({how})" if cause else how

    def _on_phase(self, phase: str) -> None:
        if self._is_loading:
            self._note_phase(phase)

    def _note_phase(self, phase: str) -> None:
        self._phase = phase
        self._update(detail=phase)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when a stop was asked for before it had one."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() and not self._stop.is_set() else None
        finally:
            await end_task(task)
            await end_task(stopped)


async def _load(engine: Engine) -> Any:
    with contextlib.suppress(ProbeFailed):
        return await engine.load()
    return None


async def end_task(task: asyncio.Task[Any], *, patience_s: float = 0.0) -> None:
    """Waits `patience_s` for the task, then cancels it until it is done: libraries may swallow a cancellation.

    What it raised is read, so that nothing complains of it later.
    """
    await asyncio.wait({task}, timeout=patience_s)
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Waits for `work` even while the waiting task is cancelled; raises the cancellation after it."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            if task.cancelled():
                raise
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return task.result()
