"""One line per set-up step with its elapsed time, and commands whose own noise goes to a log. Used by `prepare.py`."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, TextIO

LIVE_EVERY_S = 1.0  # a terminal: the line is written over
PLAIN_EVERY_S = 5.0  # a file or CI log: a new line
TAIL_LINES = 60
STOP_S = 10.0  # from SIGTERM to SIGKILL of a command that we give up


class CommandFailed(Exception):
    """A command ended with another code than 0; `tail` holds its last lines."""

    def __init__(self, argv: Sequence[str], code: int, tail: Sequence[str]) -> None:
        super().__init__(f"{' '.join(argv)}: exit code {code}")
        self.code = code
        self.tail = list(tail)


class Progress:
    """Shows which step is at what. One owner, one thread.

    `log` receives everything that the commands print; `pass_fds` are descriptors that they all keep open (a lock).
    """

    def __init__(
        self,
        out: TextIO,
        log: BinaryIO,
        *,
        steps: int,
        pass_fds: Sequence[int] = (),
        is_live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._log = log
        self._steps = steps
        self._pass_fds = tuple(pass_fds)
        self._is_live = out.isatty() and os.environ.get("TERM") != "dumb" if is_live is None else is_live
        self._clock = clock
        self._number = 0
        self._name = ""
        self._note = ""
        self._began = self._shown = clock()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announces the step, and says how long it took when it went well; a failure leaves its last line standing."""
        self._number += 1
        self._name, self._note = name, ""
        self._began = self._clock()
        self._show()
        try:
            yield
        except BaseException:
            if self._is_live:
                self._out.write("\n")
                self._out.flush()
            raise
        self._note = "done"
        self._show(is_last=True)

    def note(self, text: str) -> None:
        """What the step is at now; shown with the next refresh."""
        self._note = text
        self._refresh()

    def say(self, text: str) -> None:
        """A line that stays, for what the user should know before it happens."""
        if self._is_live:
            self._out.write("\r\x1b[K")
        self._out.write(f"      {text}\n")
        if self._is_live:
            self._show()
        self._out.flush()

    def run(
        self,
        argv: Sequence[str],
        *,
        describe: Callable[[str], str | None] = lambda line: None,
        idle: Callable[[], str | None] = lambda: None,
        env: Mapping[str, str] | None = None,
        limit_s: float = 7200.0,
    ) -> list[str]:
        """Runs a command to its end and returns its last lines.

        `describe` turns an output line into a note, or None; `idle` is asked for a note while no line comes.
        The command shares our process group, so that Ctrl-C reaches it as well; however we leave, it is gone.
        Raises CommandFailed for another exit code than 0, and when it takes longer than `limit_s`.
        """
        self._log.write(f"\n$ {' '.join(argv)}\n".encode())
        self._log.flush()
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        deadline = self._clock() + limit_s
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=self._pass_fds,
        )
        assert child.stdout is not None
        try:
            for line in self._lines(child.stdout, deadline, idle):
                tail.append(line)
                if note := describe(line):
                    self.note(note)
            code = child.wait(timeout=max(1.0, deadline - self._clock()))
        except (TimeoutError, subprocess.TimeoutExpired):
            tail.append(f"given up after {limit_s:.0f} s")
            raise CommandFailed(argv, -1, tail) from None
        finally:
            _end(child)
            child.stdout.close()
        if code != 0:
            raise CommandFailed(argv, code, tail)
        return list(tail)

    def _lines(self, pipe: IO[bytes], deadline: float, idle: Callable[[], str | None]) -> Iterator[str]:
        """Lines as they come, refreshing the display while none does. Raises TimeoutError at the deadline."""
        fd = pipe.fileno()
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while True:
                if self._clock() > deadline:
                    raise TimeoutError
                self._refresh()
                if not selector.select(timeout=0.5):
                    self._note = idle() or self._note
                    continue
                data = os.read(fd, 65536)
                if not data:
                    break
                self._log.write(data)
                self._log.flush()
                *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                yield from (line.decode(errors="replace") for line in lines if line.strip())
        if rest.strip():
            yield rest.decode(errors="replace")

    def _refresh(self) -> None:
        if self._clock() - self._shown >= (LIVE_EVERY_S if self._is_live else PLAIN_EVERY_S):
            self._show()

    def _show(self, *, is_last: bool = False) -> None:
        self._shown = self._clock()
        elapsed = self._shown - self._began
        text = f"[{self._number}/{self._steps}] {self._name}"
        if self._note or elapsed >= 1:
            text += f" · {elapsed:.0f} s"
        if self._note:
            text += f" · {self._note}"
        if self._is_live:
            width = shutil.get_terminal_size().columns
            self._out.write("\r\x1b[K" + text[: max(20, width - 1)] + ("\n" if is_last else ""))
        else:
            self._out.write(text + "\n")
        self._out.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Makes sure that the child is gone and reaped, also when a second Ctrl-C comes while we wait."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=STOP_S)
    except BaseException:
        child.kill()
        child.wait()
        raise


def open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
