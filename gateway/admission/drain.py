"""How fast a pool's queue moves, measured, and what that means for somebody who is refused. Pure; for slots.py."""

from __future__ import annotations

from collections import deque

KEPT = 64  # moves that a rate is measured over
ENOUGH = 8  # fewer say nothing
RECENT_S = 60.0
SMOOTH = 0.1  # weight of the newest request in the mean time that a slot is held
MAX_RETRY_S = 3600.0


class Drain:
    """Of one pool in one process; times in seconds on the caller's clock, which never goes back."""

    def __init__(self) -> None:
        self._moves: dict[str, deque[float]] = {}  # by class: when requests left the queue with a slot
        self._held_s: float | None = None

    def moved(self, class_name: str, now_s: float) -> None:
        """A request of the class left the queue with a slot."""
        moves = self._moves.get(class_name)
        if moves is None:
            moves = self._moves[class_name] = deque(maxlen=KEPT)  # classes are the config's: few
        moves.append(now_s)

    def held(self, seconds: float) -> None:
        """A slot was given back after that time."""
        self._held_s = seconds if self._held_s is None else self._held_s + SMOOTH * (seconds - self._held_s)

    def rate(self, class_name: str, now_s: float) -> float | None:
        """Requests of the class that leave the queue in a second, of late; None when too few did to say.

        It is the class's own: what the classes before it take is in it already.
        """
        moves = self._moves.get(class_name, ())
        recent = [at for at in moves if now_s - at <= RECENT_S]
        if len(recent) < ENOUGH or now_s <= recent[0]:
            return None
        return (len(recent) - 1) / (now_s - recent[0])

    def wait_s(
        self, class_name: str, ahead_in_class: int, ahead: int, slots: int, longest_s: float, now_s: float
    ) -> float:
        """When a request that came now would get a slot: `ahead_in_class` of its own class go first, `ahead` in all.

        Before the queue has moved often enough: by the mean time that one of the `slots` is held, or a second. Never
        less than the `longest_s` that one of the class has waited already: it stands still, whatever it did before.
        """
        rate = self.rate(class_name, now_s)
        wait_s = (ahead_in_class + 1) / rate if rate else (ahead + 1) * (self._held_s or 1.0) / max(1, slots)
        return min(MAX_RETRY_S, max(wait_s, longest_s))
