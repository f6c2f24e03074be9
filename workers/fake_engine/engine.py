"""The fake engine core: slots, queue, counters and words; `api.py` runs jobs on it, `metrics.py` shows it."""

from __future__ import annotations

import asyncio
import heapq
import re
import zlib
from collections import Counter
from functools import lru_cache
from typing import Final

from workers.fake_engine.options import Options

_TEXT: Final = (
    "river stone quiet lamp north paper garden seven cloud iron bread window slow amber harbour pine "
    "letter copper winter road field moth glass early salt tower velvet green bell orchard rope dawn"
)
_WORDS: Final = _TEXT.split()
_PIECE: Final = re.compile(r" ?[^\s]{1,4}|\s")


class Engine:
    """Counters and the queue before the slots; one per process, used from its event loop only."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = 0
        self.running = 0
        self.most_running = 0  # at once, so far
        self.jobs: set[asyncio.Task[None]] = set()
        self.accepted = 0  # completions, good or bad
        self.aborted = 0  # completions whose client left
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.kv_tokens = 0  # of the running ones
        self.finished: Counter[str] = Counter()
        self.dead = False  # engine core gone: /health is 503
        self.refuses_new = False  # draining, as with --shutdown-timeout
        self.stop_mode: str | None = None  # abort, error or hang: what running jobs do when they are cancelled

    @property
    def waiting(self) -> int:
        return sum(not place.done() for _, _, place in self._queue)

    @property
    def hangs(self) -> bool:
        """True when this completion is past the number that is still answered."""
        limit = self._options.hang_after
        return limit is not None and self.accepted > limit

    async def acquire(self, priority: int) -> None:
        """Waits for a slot: lower priority first where --scheduling-policy priority, else in order of arrival."""
        if self.running < self._options.slots:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return
        self._arrivals += 1
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority if self._options.by_priority else 0, self._arrivals, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Gives the slot to the next in the queue that still waits."""
        while self._queue:
            _, _, place = heapq.heappop(self._queue)
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1

    def stop_jobs(self, mode: str, except_for: asyncio.Task[None] | None = None) -> None:
        """Ends the running jobs as a dying engine core does: abort, error or hang."""
        self.stop_mode = mode
        for job in list(self.jobs):
            if job is not except_for:
                job.cancel()


@lru_cache(maxsize=256)
def count_tokens(text: str) -> int:
    """Tokens of a text: pieces of up to four characters. Raises UnicodeEncodeError for a lone surrogate."""
    text.encode()
    return len(_PIECE.findall(text))


def token_ids(text: str) -> list[int]:
    """One id per token, the same for the same piece."""
    return [zlib.crc32(piece.encode()) % 49_152 for piece in _PIECE.findall(text)]


def words(prompt: str, choice: int, count: int) -> list[str]:
    """The answer to a prompt, one word per token; equal prompts and choices give equal answers."""
    first = zlib.crc32(prompt.encode(errors="replace")) + choice
    picked = [f" {_WORDS[(first + at) % len(_WORDS)]}" for at in range(count)]
    return [picked[0].lstrip(), *picked[1:]] if picked else []


def pieces_of(text: str) -> list[str]:
    """A given text cut before its blanks; joined again it is the same text."""
    return re.findall(r"\s?[^\s]+|\s", text)
