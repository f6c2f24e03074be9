"""Who of those that wait for one pool goes next: strict by class, with ageing, fair among users. Pure; for slots.py.

Inside a priority users take turns by deficit round robin (Shreedhar and Varghese, 1996) on the tokens that their
requests reserve: who asks for long answers goes less often, and to have many requests waiting buys nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice

QUANTUM = 512  # tokens that a user's turn is worth
AGED_PART = 0.5  # a request that has waited for this part of its class's `queue_s` is aged
AGED_EVERY = 10  # of so many that leave the queue one may be an aged request of a class that would not be its turn


class Waiter:
    """One request that waits; in the queues of all pools that may serve it. Owned by slots.py."""

    __slots__ = ("aged_at", "class_name", "cost", "future", "priority", "queues", "since_s", "user")

    def __init__(self, class_name: str, priority: int, user: str, cost: int, since_s: float, queue_s: float) -> None:
        """`cost` in tokens; `queue_s` is the class's; times on the caller's clock."""
        self.class_name = class_name
        self.priority = priority
        self.user = class_name, user
        self.cost = max(1, cost)
        self.since_s = since_s
        self.aged_at = since_s + AGED_PART * queue_s
        self.future: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the pool that has a slot for it
        self.queues: list[Queue] = []

    def leave(self) -> None:
        """All queues at once; nothing happens to who has left."""
        for queue in self.queues:
            queue.remove(self)
        self.queues.clear()


class Tier:
    """All who wait with one priority. `users` is in the order of their turns; who waits no more keeps no deficit."""

    __slots__ = ("_deficits", "users", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}  # in the order in which they came
        self.users: dict[tuple[str, str], dict[Waiter, None]] = {}  # by class and user; no empty ones
        self._deficits: dict[tuple[str, str], int] = {}

    def add(self, waiter: Waiter) -> None:
        self.waiters[waiter] = None
        mine = self.users.get(waiter.user)
        if mine is None:
            mine = self.users[waiter.user] = {}
            self._deficits[waiter.user] = QUANTUM if len(self.users) == 1 else 0
        mine[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        del self.waiters[waiter]
        mine = self.users[waiter.user]
        del mine[waiter]
        if not mine:
            had_turn = next(iter(self.users)) == waiter.user
            del self.users[waiter.user], self._deficits[waiter.user]
            if had_turn and self.users:
                self._deficits[next(iter(self.users))] += QUANTUM

    def next(self) -> Waiter:
        """Whose turn it is, charged to its user; not removed. Only while somebody waits."""
        while True:
            for _ in range(len(self.users) + 1):
                user = next(iter(self.users))
                head = next(iter(self.users[user]))
                if head.cost <= self._deficits[user]:
                    self._deficits[user] -= head.cost
                    return head
                self.users[user] = self.users.pop(user)  # to the end
                self._deficits[next(iter(self.users))] += QUANTUM
            # all ask for more than a turn is worth: as many rounds at once as the nearest of them needs
            missing = min(next(iter(mine)).cost - self._deficits[user] for user, mine in self.users.items())
            rounds = -(-missing // QUANTUM)
            if rounds > 0:
                for user in self.users:
                    self._deficits[user] += rounds * QUANTUM


class Queue:
    """Of one pool in one process."""

    def __init__(self) -> None:
        self._tiers: dict[int, Tier] = {}  # by priority; no empty ones
        self._waiting: dict[str, int] = {}  # by class
        self._length = 0
        self._since_aged = 0  # that left by their turn since an aged one did

    def __len__(self) -> int:
        return self._length

    def waiting(self, class_name: str) -> int:
        return self._waiting.get(class_name, 0)

    def by_class(self) -> Iterator[tuple[str, int]]:
        return iter(self._waiting.items())

    def by_priority(self) -> Iterator[tuple[int, int]]:
        """(priority, how many wait), any order."""
        return ((priority, len(tier.waiters)) for priority, tier in self._tiers.items())

    def hoarded(self, class_name: str, user: str) -> Waiter | None:
        """The last request of the class from the user who has most of them waiting, if `user` has at least two fewer.

        It gives its place to `user`: a queue filled by one caller would else be closed to all others.
        """
        for tier in self._tiers.values():
            of_class = {who: mine for (name, who), mine in tier.users.items() if name == class_name}
            if of_class:
                most = max(of_class.values(), key=len)
                return next(reversed(most)) if len(most) >= len(of_class.get(user, ())) + 2 else None
        return None

    def newest(self, class_name: str, count: int) -> list[Waiter]:
        """The last `count` of the class that came."""
        if count <= 0:
            return []
        found = (w for tier in self._tiers.values() for w in reversed(tier.waiters) if w.class_name == class_name)
        return list(islice(found, count))

    def add(self, waiter: Waiter) -> None:
        tier = self._tiers.get(waiter.priority)
        if tier is None:
            tier = self._tiers[waiter.priority] = Tier()
        tier.add(waiter)
        waiter.queues.append(self)
        self._waiting[waiter.class_name] = self.waiting(waiter.class_name) + 1
        self._length += 1

    def remove(self, waiter: Waiter) -> None:
        """Void for one that is not here."""
        tier = self._tiers.get(waiter.priority)
        if tier is None or waiter not in tier.waiters:
            return
        tier.remove(waiter)
        if not tier.waiters:
            del self._tiers[waiter.priority]
        self._waiting[waiter.class_name] -= 1
        self._length -= 1

    def pop(self, now_s: float) -> Waiter | None:
        """The one that goes next, out of all queues that it waits in; None when nobody waits."""
        if not self._length:
            return None
        priorities = sorted(self._tiers)
        waiter = next(iter(self.aged(now_s, 1, priorities[1:])), None) if self._since_aged + 1 >= AGED_EVERY else None
        if waiter is not None:
            self._since_aged = 0
        else:
            self._since_aged = min(AGED_EVERY, self._since_aged + 1)
            waiter = self._tiers[priorities[0]].next()
        waiter.leave()
        return waiter

    def aged(self, now_s: float, most: int, priorities: Iterable[int] | None = None) -> list[Waiter]:
        """Aged ones, `most` of them, the longest waiting first; of each user only the first. `priorities`: of these."""
        tiers = self._tiers.values() if priorities is None else (self._tiers[priority] for priority in priorities)
        heads = (next(iter(mine)) for tier in tiers for mine in tier.users.values())
        return sorted((head for head in heads if head.aged_at <= now_s), key=lambda head: head.since_s)[:most]

    def longest_s(self, class_name: str, now_s: float) -> float:
        """How long the first of the class has waited; 0 if none does."""
        heads = (
            next(iter(mine)).since_s
            for tier in self._tiers.values()
            for key, mine in tier.users.items()
            if key[0] == class_name
        )
        return max((now_s - since_s for since_s in heads), default=0.0)
