"""One child process and all of its descendants: start, wait, stop in order, kill to the last one. Used by `worker.py`.

Descendants are found by session, by parentage, by having been seen before, and by a mark in their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from workers import proc
from workers.command import Launch
from workers.errors import StartRefused
from workers.logs import ChildLog
from workers.proc import Family, Identity

# until every killed process must be gone: one that gives back much memory takes seconds, one in an uninterruptible
# system call may stay for ever
KILL_S = 30.0
SECOND_TERM_S = 2.0  # vLLM swallows a first SIGTERM while its engine starts; a second one then works


class Child:
    """A running `vllm serve`. Whoever spawns it must call `stop` or `kill`, then `close`, whatever happens between."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch, log: ChildLog, root: Identity) -> None:
        self._process = process
        self._launch = launch
        self._root = root
        self.log = log
        self.family = Family(launch.mark, root.pid, {root})

    @property
    def identity(self) -> Identity:
        return self._root

    @staticmethod
    async def spawn(launch: Launch, log_path: Path, on_phase: Callable[[str], None]) -> Child:
        """Starts it in a session of its own, its output drained from the first byte. Makes the run folder.

        Raises StartRefused when the command cannot be run. A supervisor must not ignore SIGINT when it calls this:
        the child would inherit that, and vLLM then cannot be interrupted.
        """
        launch.run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe()
        try:
            # the pipe is ours and not asyncio's, whose wait() would also wait for descendants to close it
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env=launch.env,
                cwd=launch.run_folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
            )
        except OSError as exc:
            os.close(read_fd)
            remove_folder(launch.run_folder)
            raise StartRefused(
                f'cannot run "{launch.argv[0]}": {exc.strerror}; set workers.vllm to the vllm command'
            ) from exc
        finally:
            os.close(write_fd)
        row = proc.row_of(process.pid)
        root = Identity(process.pid, row.start_ticks if row else 0)  # no row: it is gone already
        return Child(process, launch, ChildLog(read_fd, log_path, on_phase), root)

    async def wait(self) -> int:
        """The exit status of the first process; negative: ended by that signal. Its descendants may live on."""
        return await self._process.wait()

    async def note_family(self) -> set[Identity]:
        """Remembers the descendants of this moment, so that one that cuts all ties later is still known as ours."""
        return await asyncio.to_thread(self._note_family)

    async def stop(self, stop_s: float) -> list[int]:
        """SIGTERM, again after 2 s, SIGKILL of everything after `stop_s`. Returns pids that would not die."""
        await self.note_family()
        for patience_s in (min(SECOND_TERM_S, stop_s), max(0.0, stop_s - SECOND_TERM_S)):
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.wait()
                break
        return await self.kill()

    async def kill(self) -> list[int]:
        """SIGKILL of every process of the family until none is left; returns pids that are still there after KILL_S."""
        left = await asyncio.to_thread(proc.kill_family, self.family, KILL_S)
        if self._root.pid not in left:
            await self.wait()  # reaped by the loop's child watcher
        return left

    async def close(self) -> None:
        """After `stop` or `kill`: the log to its end, then the run folder."""
        await self.log.close()
        await asyncio.to_thread(remove_folder, self._launch.run_folder)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _note_family(self) -> set[Identity]:
        found = proc.members(self.family, proc.table())
        proc.reap_adopted(found, self._root.pid)
        self.family.seen = {row.identity for row in found}
        return self.family.seen


def remove_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
