"""Makes the supervisor the parent of every orphan below it. Called by `cli.py` at start."""

from __future__ import annotations

from gateway.config.parent import prctl

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Descendants whose parent dies become our children and not those of PID 1: found, and reaped by us."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
