"""Whose turn it is on one connection: one request is answered, those pipelined behind it wait, in their order.

front.py brings the requests in; what an exchange writes, and that it has ended, comes here (line.py).
"""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from gateway.edge.app_cycle import AppCycle
from gateway.edge.context import Exchange
from gateway.edge.lane import Handler, Lane
from gateway.edge.timers import Timers

MAX_PIPELINED = 32  # requests that wait for the replies to those ahead of them
Turn = Exchange | AppCycle


class Turns:
    """Owns who may write, `current`, and who waits for that. `lost` ends it.

    Nobody begins while the client takes no more: what is answered all at once would else pile up before a client that
    asks and never reads.

    `is_receiving` is front.py's: the head of a request was read, its end not yet. A last reply whose request is not
    whole lets the connection linger: it ends what is written, and nothing that comes is wanted any more.
    """

    __slots__ = (
        "_lane",
        "_loop",
        "_queue",
        "_server",
        "_timers",
        "current",
        "flow",
        "is_full",
        "is_lingering",
        "is_receiving",
        "transport",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        timers: Timers,
        loop: asyncio.AbstractEventLoop,
        server: ServerState,
        lane: Lane,
    ) -> None:
        self.transport = transport
        self.flow = FlowControl(transport)
        self.current: Turn | None = None
        self.is_full = False
        self.is_receiving = False
        self.is_lingering = False
        self._timers = timers
        self._loop = loop
        self._server = server
        self._lane = lane
        self._queue: deque[tuple[Turn, Handler | None]] = deque()

    # --- for the connection -----------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """A request is being answered, or waits for it."""
        return self.current is not None or bool(self._queue)

    def take(self, turn: Turn, handler: Handler | None) -> bool:
        """Lets `turn` be answered, now or behind those ahead of it; by `handler` if it is an exchange.

        False: it is not wanted, since the connection ends before it, or does so now for too many that wait.
        """
        if not self.is_busy and not self.is_full:
            self._begin(turn, handler)
            return True
        if self.is_busy and (len(self._queue) >= MAX_PIPELINED or not self._last.keep_alive):
            self.stop_behind_last()
            return False
        self._queue.append((turn, handler))
        self._timers.idle_since = None
        return True

    def _begin(self, turn: Turn, handler: Handler | None) -> None:
        self.current = turn
        self._timers.idle_since = None
        tasks = self._server.tasks
        if isinstance(turn, Exchange):
            assert handler is not None
            turn.task = task = self._loop.create_task(handler(turn))
        else:
            task = self._loop.create_task(turn.run_asgi(turn.app))
            task.add_done_callback(tasks.discard)
        tasks.add(task)

    @property
    def _last(self) -> Turn:
        """Only while busy."""
        last = self._queue[-1][0] if self._queue else self.current
        assert last is not None
        return last

    def keeps(self, turn: Turn) -> bool:
        """More of the body of `turn` came than is kept while nobody has asked for it: the rest of it has to wait.

        Not where `turn` itself waits for the reply to another: who does not read does not notice that the caller of
        that one leaves. So it is given up, the connection ends before it, and the answer is False.
        """
        if turn is self.current or (self.current is None and turn is self._queue[0][0]):
            self.flow.pause_reading()
            return True
        self._queue.pop()
        self.stop_behind_last()
        return False

    def stop_behind_last(self) -> None:
        """Nothing more is read: the connection ends with the reply to the last request. Only while busy."""
        self._last.keep_alive = False

    def stop(self) -> None:
        """The server stops: an idle connection closes now, others after the reply of the moment."""
        if self.current is None:
            self.transport.close()
        else:
            self.current.keep_alive = False

    def full(self) -> None:
        """The client takes no more for now."""
        self.is_full = True
        self.flow.pause_writing()
        if isinstance(self.current, Exchange):
            self.current.full()
        self._timers.start_write()

    def room(self) -> None:
        """The client takes more again."""
        self.is_full = False
        self.flow.resume_writing()
        self._timers.end_write()
        if isinstance(self.current, Exchange):
            self.current.room()
        elif self.current is None and self._queue and not self.transport.is_closing():
            self._begin(*self._queue.popleft())

    def left(self) -> None:
        """The caller sends nothing more: nobody works for it from now on."""
        self._queue.clear()
        if self.current is not None:
            self.current.abandon()

    def lost(self) -> None:
        """The connection is gone: the caller of the moment counts as gone too, those behind it have not begun."""
        self._timers.cancel()
        self._queue.clear()
        self.is_full = False
        self.flow.resume_writing()
        current, self.current = self.current, None
        if isinstance(current, Exchange) and current.task is not None:
            # one that is cancelled before it began cannot say that it has ended
            current.task.add_done_callback(self._server.tasks.discard)
        if current is not None:
            current.abandon()

    # --- for the exchange -------------------------------------------------------------------------------------------

    @property
    def date_line(self) -> bytes:
        return self._lane.date.of(self._server.default_headers)

    def new_id(self) -> str:
        return self._lane.ids.new()

    def handler_ended(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._server.tasks.discard(task)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def cut(self) -> None:
        self.transport.abort()

    def resume_reading(self) -> None:
        self.flow.resume_reading()

    def ended(self) -> None:
        self._server.total_requests += 1
        current, self.current = self.current, None
        timers = self._timers
        now = self._loop.time()
        timers.idle_since = None if self._queue else now
        if self.is_full:
            timers.reply_ended(now)
        if self.transport.is_closing():
            return
        if current is not None and not current.keep_alive:
            if self.is_receiving:
                self._linger()
            else:
                self.transport.close()
            return
        self.flow.resume_reading()
        if self.is_receiving:  # refused before its body was there: who sends on?
            timers.start_head()
        if self._queue:
            if not self.is_full:
                self._begin(*self._queue.popleft())
        elif timers.idle is None:
            timers.start_idle()

    def _linger(self) -> None:
        """The reply is the last one, and its caller still sends: drop that for HEAD_S, or until the caller closes.

        Closed at once, the connection would be reset, and most clients then never look at the reply.
        """
        self.is_lingering = True
        self._queue.clear()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timers.start_head()
