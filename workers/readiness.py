"""When a worker is ready, when it is no longer, and when it is idle: waits over the probes of `health.py`.

Called by `life.py`, which owns the child and sets the deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, retry_if_exception_type, wait_fixed

from gateway.domain.replica import Load
from workers.errors import EngineDead, ProbeFailed
from workers.health import Engine, EngineFacts, check_port_owner
from workers.process import Child

READY_POLL_S = 0.5
WATCH_S = 1.0
IDLE_POLL_S = 0.2
MAX_STRIKES = 6  # failed probes in a row before a worker counts as dead; each waits up to health.PROBE_S
ROUNDS_PER_LOOK = 5  # of WATCH_S, between two looks at the process tree


async def until_ready(
    child: Child, engine: Engine, *, on_warming: Callable[[], None], on_refusal: Callable[[str], None]
) -> EngineFacts:
    """Ready: our own child has the port to itself, /health, the expected model under our key, one real token.

    `on_warming` is called once, when only the token may still be out; `on_refusal` with the reason of each failed try.
    Raises PortTaken. Tries until then: the deadline is the caller's.
    """
    is_warming = False
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(ProbeFailed), wait=wait_fixed(READY_POLL_S), reraise=True
    ):
        with attempt:
            try:
                await engine.check_health()
                pids = {identity.pid for identity in await child.note_family()}
                await asyncio.to_thread(check_port_owner, engine.port, pids)
                if not is_warming:
                    is_warming = True
                    on_warming()
                facts = await engine.facts()
                await engine.check_one_token()
            except ProbeFailed as exc:
                on_refusal(exc.message)
                raise
    return facts


async def until_unhealthy(
    engine: Engine, *, on_load: Callable[[Load | None], None], on_look: Callable[[], Awaitable[None]]
) -> str:
    """Probes a ready worker until it fails, and says how. `on_look` is awaited every few rounds."""
    strikes = rounds = 0
    while True:
        await asyncio.sleep(WATCH_S)
        rounds += 1
        try:
            await engine.check_health()
            on_load(await load_if_known(engine))
            strikes = 0
        except EngineDead as exc:
            return exc.message
        except ProbeFailed as exc:
            on_load(None)
            strikes += 1
            if strikes >= MAX_STRIKES:
                return f"{strikes} probes in a row failed: {exc.message}"
        if rounds % ROUNDS_PER_LOOK == 0:
            await on_look()


async def until_idle(engine: Engine, *, settle_s: float, on_load: Callable[[Load], None]) -> None:
    """First `settle_s` for requests that are on their way, then until none is in flight, or nobody knows."""
    await asyncio.sleep(settle_s)
    while (load := await load_if_known(engine)) is not None and load.running + load.waiting > 0:
        on_load(load)
        await asyncio.sleep(IDLE_POLL_S)


async def load_if_known(engine: Engine) -> Load | None:
    try:
        return await engine.load()
    except ProbeFailed:
        return None
