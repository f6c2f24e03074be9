"""One start of one worker: spawn, wait until ready, watch, and end it so that nothing is left. Run by `worker.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.config.tasks import end_task, to_its_end
from gateway.domain.replica import ReplicaState
from workers import proc
from workers.command import Launch, launch_of
from workers.engine_key import engine_key
from workers.errors import PortTaken
from workers.health import Engine
from workers.leftovers import WorkerRecord
from workers.log_lines import cause_of, names_a_cause
from workers.ports import internal_port
from workers.process import Child
from workers.readiness import load_if_known, until_idle, until_ready, until_unhealthy
from workers.spec import WorkerSpec
from workers.surroundings import Surroundings

logger = logging.getLogger(__name__)

FLUSH_S = 3.0
ARGPARSE_STATUS = 2  # vLLM does not know an option or its value: the same start cannot succeed


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
        *,
        enter: Callable[[ReplicaState, str], None],
        update: Callable[..., None],
        stop: asyncio.Event,
        hurry: asyncio.Event,
    ) -> None:
        self._spec = spec
        self._around = surroundings
        self._enter = enter
        self._update = update
        self._stop = stop
        self._hurry = hurry
        self._key = ""
        self._was_ready = False
        self._is_loading = True  # its log tells the phase
        self._phase = "importing"
        self._refusal = "no probe was answered"

    async def run(self) -> End | None:
        """None: a stop was asked for. No process of this start is left afterwards.

        Raises StartRefused, GpuBusy, and OSError when the state directory cannot be written.
        """
        gpus = self._spec.gpus
        self._enter(ReplicaState.STARTING, f"waiting for GPU {', '.join(gpus)}" if gpus else "")
        async with contextlib.AsyncExitStack() as turn:
            if not await self._unless_stopped(self._take_turn(turn)):
                return None
            port = self._around.ports.take()
            try:
                return await self._on_port(port, turn)
            finally:
                self._around.ports.release(port)

    async def _take_turn(self, turn: contextlib.AsyncExitStack) -> None:
        """Enters the GPUs, and memory free on them, into `turn`; closing it lets the next worker start there."""
        await turn.enter_async_context(self._around.gpus.hold(self._spec.gpus))
        await self._around.gpus.wait_for_memory(self._spec.gpus, self._spec.memory_share)

    async def _on_port(self, port: int, turn: contextlib.AsyncExitStack) -> End | None:
        self._key = engine_key(self._spec.state_dir, self._spec.id)
        launch = launch_of(
            self._spec,
            port=port,
            internal_port=internal_port(self._around.slot),
            engine_key=self._key,
            nonce=secrets.token_hex(6),
            temp_folder=self._around.temp_folder,
            parent_env=self._around.parent_env,
        )
        self._record_of(launch, port).write(self._spec.record_path)  # before the spawn: the mark alone finds the child
        left: list[int] = []
        try:
            child = await Child.spawn(launch, self._spec.log_path, self._on_phase)
            self._update(url=f"http://127.0.0.1:{port}", pid=child.identity.pid, api_key=self._key, detail=self._phase)
            try:
                end = await self._until_end(child, launch, port, turn)
            finally:
                left = await to_its_end(self._bury(child))
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
        engine = Engine(port, self._key, self._spec.served_name)
        exited = asyncio.create_task(child.wait())
        watched = asyncio.create_task(self._watch(child, launch, engine, turn))
        stopped = asyncio.create_task(self._stop.wait())
        tasks = {exited, watched, stopped}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await end_task(watched)
                await self._leave(engine)
                return None
            end = exited.result() if exited.done() else watched.result()
            # out of rotation before the cleaning up, which may take seconds; the cause is known after it
            self._enter(ReplicaState.BACKOFF, "died, ending what is left of it")
            return end
        finally:
            for task in tasks:
                await end_task(task)
            await engine.aclose()

    async def _watch(self, child: Child, launch: Launch, engine: Engine, turn: contextlib.AsyncExitStack) -> End:
        async def save() -> None:
            seen = tuple(sorted(await child.note_family()))
            record = self._record_of(launch, engine.port, child.identity, seen)
            try:
                await asyncio.to_thread(record.write, self._spec.record_path)
            except OSError as exc:  # a full disk must not end a worker that serves
                logger.warning("worker %s: its record cannot be written: %s", self._spec.id, exc)

        await save()
        try:
            async with asyncio.timeout(self._spec.load_s):
                facts = await until_ready(child, engine, on_warming=self._on_warming, on_refusal=self._on_refusal)
        except TimeoutError:
            return End(
                f"not ready after {self._spec.load_s:g} s (last phase: {self._phase}; {self._refusal}); "
                "raise workers.load_s if it only needs longer",
                was_ready=False,
            )
        except PortTaken as exc:
            return End(exc.message, was_ready=False)
        await save()
        await turn.aclose()
        self._was_ready = True
        child.log.forget_causes()
        self._update(max_model_len=facts.max_model_len, engine_version=facts.version, load=await load_if_known(engine))
        self._enter(ReplicaState.READY, "")
        cause = await until_unhealthy(engine, on_load=lambda load: self._update(load=load), on_look=save)
        return End(cause, was_ready=True)

    async def _leave(self, engine: Engine) -> None:
        """Out of rotation: told to the gateways, then time for what is in flight, bounded by `drain_s`."""
        self._is_loading = False
        self._enter(ReplicaState.DRAINING, "")
        is_known = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                is_known = await self._around.board.flush()
        if not self._was_ready or self._hurry.is_set():
            return
        settle_s = self._around.settle_s if is_known else 0.0
        idle = asyncio.create_task(
            until_idle(
                engine,
                settle_s=settle_s,
                on_load=lambda load: self._update(
                    load=load, detail=f"{load.running + load.waiting} requests in flight"
                ),
            )
        )
        hurried = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({idle, hurried}, timeout=self._around.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_task(idle)
            await end_task(hurried)

    async def _bury(self, child: Child) -> list[int]:
        """Ends whatever is left of the process tree and cleans up after it; returns the pids that would not die."""
        left = await child.stop(self._spec.stop_s) if self._stop.is_set() else await child.kill()
        await child.close()
        return left

    def _record_of(
        self, launch: Launch, port: int, root: proc.Identity | None = None, seen: tuple[proc.Identity, ...] = ()
    ) -> WorkerRecord:
        return WorkerRecord(
            id=self._spec.id,
            mark=launch.mark,
            port=port,
            run_folder=str(launch.run_folder),
            boot_id=proc.boot_id(),
            pid=root.pid if root else None,
            start_ticks=root.start_ticks if root else None,
            seen=tuple((pid, start_ticks) for pid, start_ticks in {*seen, *((root,) if root else ())}),
        )

    def _exit_cause(self, status: int, child: Child) -> str:
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        if status == 0:
            how += ", which nobody asked for"
        lines = child.log.lines()
        if status == -signal.SIGKILL and not any(map(names_a_cause, lines)):
            return f"{how}, by somebody or by the kernel when memory ran out"  # it could not say a last word
        cause = cause_of(lines)
        return f"{cause} ({how})" if cause else how

    def _on_phase(self, phase: str) -> None:
        if self._is_loading:
            self._phase = phase
            self._update(detail=phase)

    def _on_warming(self) -> None:
        self._is_loading = False
        self._enter(ReplicaState.WARMING, "first token")

    def _on_refusal(self, reason: str) -> None:
        self._refusal = reason

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` was done before a stop was asked for; else it is cancelled."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return False
            task.result()
            return True
        finally:
            await end_task(task)
            await end_task(stopped)
