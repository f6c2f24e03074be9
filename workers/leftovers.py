"""What a supervisor leaves on disk about its workers, so that the next one can end what a killed one left running.

`worker.py` writes a record per start; `supervisor.py` takes the lock and clears leftovers before it starts anything.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from workers import proc
from workers.errors import SupervisorBusy
from workers.proc import Family, Identity
from workers.process import KILL_S, remove_folder


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One start of one worker. Written before the spawn with no processes, then again as they become known."""

    id: str
    mark: str
    port: int
    run_folder: str
    boot_id: str
    pid: int | None = None
    start_ticks: int | None = None
    seen: tuple[tuple[int, int], ...] = ()  # (pid, start time in ticks since boot) of every process known as its own

    def write(self, path: Path) -> None:
        """Whole or not at all; readable by this user only."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        os.replace(draft, path)

    @staticmethod
    def read(path: Path) -> WorkerRecord:
        """Raises ValueError for a file that `write` did not make."""
        try:
            data = json.loads(path.read_text())
            return WorkerRecord(**{**data, "seen": tuple((int(p), int(t)) for p, t in data["seen"])})
        except (TypeError, KeyError) as exc:
            raise ValueError(f"{path} is no worker record") from exc


def lock(state_dir: Path) -> IO[str]:
    """Holds the state directory for this supervisor until the returned file is closed or the process ends.

    Raises SupervisorBusy when another one has it: two would kill each other's workers as leftovers.
    """
    path = state_dir / "workers" / "lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = open(path, "a+")  # noqa: SIM115 (the caller holds it open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise SupervisorBusy(
            f"a supervisor already runs on {state_dir} (pid {holder}); stop it, or set another gateway.state_dir"
        ) from exc
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def end_leftovers(state_dir: Path) -> list[str]:
    """Kills what recorded starts left running and removes their folders and records; blocking. The lock must be held.

    A process is a leftover only by pid and start time, by the mark, or as kin of such a one: never by its pid alone.
    Returns a line per record that was found, for the log. A record whose processes would not die is kept.
    """
    report = []
    for path in sorted((state_dir / "workers").glob("*.json")):
        try:
            record = WorkerRecord.read(path)
        except ValueError as exc:
            report.append(f"{exc}; removed")
            path.unlink(missing_ok=True)
            continue
        known = {Identity(*pair) for pair in record.seen} if record.boot_id == proc.boot_id() else set()
        family = Family(record.mark, None, known)
        found = proc.members(family, rows := proc.table(), proc.marked(rows, record.mark))
        left = proc.kill_family(family, KILL_S)
        if left:
            report.append(f"{record.id}: left by an earlier supervisor and cannot be killed: pids {left}")
            continue
        alive = sorted(row.pid for row in found if not row.is_zombie)
        report.append(
            f"{record.id}: an earlier supervisor left " + (f"pids {alive}; killed" if alive else "no process")
        )
        remove_folder(Path(record.run_folder))
        path.unlink(missing_ok=True)
    return report
