"""Keeps this process's accounts filled from Redis and tells Redis what comes back; gate.py asks it, app.py starts it.

One exchange (budget.lua) is on its way at a time and carries everything that gathered meanwhile. While Redis is away
`redis.on_outage` decides: `share` (this process goes on alone with the limit divided by the gateway processes last seen
alive), `open` (no limits) or `closed` (StoreUnavailable).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal
from weakref import WeakValueDictionary

from gateway.admission.account import FOREVER, UNLIMITED, Account, Lease, Ticket, Waiter, clamped
from gateway.admission.alone import admit_alone
from gateway.admission.exchange import GATEWAYS_KEY, Answer, Exchange, Grant, Script, Wish, wish_of
from gateway.admission.holdings import Holdings
from gateway.admission.limits import SPAN_S, Kind, Limit, Reading, Scope, limits_of, refusal
from gateway.admission.link import PATIENT_S, PROBE_S, RedisLink, unavailable
from gateway.admission.local import Ledgers
from gateway.config.tasks import end_task
from gateway.domain.errors import GatewayError, StoreUnavailable
from gateway.domain.outcome import Ending, Outcome
from gateway.domain.request import NO_RATE

log = logging.getLogger(__name__)

RENEW_S = 10.0
TICK_S = 0.25  # idle leases and slots are looked after, and go back, so often
QUIET_TICKS = 3  # of a caller who comes no more: then its lease goes back, be it renewed or not
OWED_TICKS = 3  # what settled tickets owe waits so long for an exchange to go with, unless little is left of a limit
AGAIN_S = 0.025  # what another process gives back as its request ends may still be on its way: ask once more
MAX_WISHES = 16  # accounts in one exchange: a script holds up everybody else in Redis
NOTHING_USED = Outcome(Ending.CLIENT_GONE, 499, None)


class Budget:
    """One per process and config revision's outage policy. `start()` runs its background task, `aclose()` ends it."""

    def __init__(
        self,
        link: RedisLink,
        *,
        on_outage: Literal["share", "open", "closed"],
        expected_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`expected_processes`: how many gateways to assume until Redis told how many are alive; never fewer share.

        `wall_clock` is asked once: it tells the date until Redis does.
        """
        self._link = link
        self._on_outage = on_outage
        self._clock = clock
        self._script = Script(link)
        self._ledgers = Ledgers()
        self._ledgers.calendar.offset_s = wall_clock() - clock()
        self._accounts: WeakValueDictionary[tuple[Limit, ...], Account] = WeakValueDictionary()
        self._unlimited = Account((), (), self, clock)
        self._unlimited.lease = Lease(None, 0.0, FOREVER, UNLIMITED, UNLIMITED, NO_RATE)
        self._holdings = Holdings()
        self._asking: dict[Account, None] = {}
        self._later: list[tuple[Account, Waiter]] = []  # asked once, to be asked again in AGAIN_S
        self._number = self._answered = 0  # of the exchanges: begun, and the last whose reply came
        self._lock = asyncio.Lock()  # of the exchange on its way
        self._pump: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._owed_ticks = 0
        self._is_urgent = False  # what is owed does not wait for the next call
        self._expected = max(1, expected_processes)
        self.process_id = uuid.uuid4().hex
        self.processes = self._expected  # gateways alive, as last heard

    # --- one request --------------------------------------------------------------------------------------------------

    def account(self, scopes: Sequence[Scope]) -> Account:
        """The account of these limits, the same one as long as anybody refers to it."""
        limits = limits_of(scopes)
        if not limits:
            return self._unlimited
        account = self._accounts.get(limits)
        if account is None:
            account = self._accounts[limits] = Account(limits, self._ledgers.of(limits), self, self._clock)
        return account

    async def admit(self, account: Account, tokens: int) -> Ticket:
        """One request of `tokens` charged to all of the account's limits, or to none.

        Raises LimitExceeded, or StoreUnavailable under `closed`. A caller cancelled meanwhile owes nothing. The caller
        settles the ticket exactly once.
        """
        tokens = clamped(tokens)
        ticket = account.admit(tokens)
        if ticket is not None:
            return ticket
        if self._is_closed or (self._link.is_away and self._pump is not None):  # it asks whether Redis is back
            self._link.refused_calls += 1
            return self._without_redis(account, tokens)
        waiter = Waiter(asyncio.get_running_loop().create_future(), tokens)
        self._ask(account, waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().settle(NOTHING_USED)
            raise

    def _ask(self, account: Account, waiter: Waiter) -> None:
        account.waiters.append(waiter)
        self._asking[account] = None
        self._kick()

    def _without_redis(self, account: Account, tokens: int) -> Ticket:
        """Raises LimitExceeded by this process's share, or StoreUnavailable."""
        if self._on_outage == "closed":
            raise unavailable()
        if self._on_outage == "open":
            return self._unlimited.spend(self._unlimited.lease, 0)
        ticket = admit_alone(account, tokens, self._holdings, self.processes, self._clock())
        self._arm(PROBE_S)
        return ticket

    # --- one exchange -------------------------------------------------------------------------------------------------

    async def _exchange(self, timeout_s: float | None = None) -> None:
        """Raises StoreUnavailable, after everybody who waits has been answered without Redis."""
        async with self._lock:
            sent_s = self._clock()
            wishes = [self._wish(account, sent_s) for account in list(self._asking)[:MAX_WISHES]]
            slots = self._holdings.slots([wish.account for wish in wishes])
            self._number += 1
            gives = self._holdings.gives(self._number, sent_s)
            numbers = self._number, self._answered
            exchange = Exchange(self.process_id, *numbers, self._expected, gives, slots, wishes)
            try:
                answer = await self._script.send(exchange, timeout_s)
                self._answered = self._number
                self._holdings.confirm(gives)
                self.processes = answer.processes
                self._ledgers.calendar.offset_s = answer.now_ms / 1000 - sent_s
                for wish, grant in zip(wishes, answer.grants, strict=True):
                    self._granted(wish, grant, answer, sent_s)
            except BaseException:
                self._holdings.dirty.update(dict.fromkeys(slots))
                self._fail(wishes)
                raise

    def _wish(self, account: Account, now_s: float) -> Wish:
        if account.waiters:  # what it has does not do: all of it goes back in the same step
            self._holdings.close(account)
            self._holdings.trim(account, 0)
        wish = wish_of(account, now_s, SPAN_S + TICK_S)
        if not account.waiters:
            self._asking.pop(account, None)
        return wish

    def _granted(self, wish: Wish, grant: Grant, answer: Answer, sent_s: float) -> None:
        account, holdings = wish.account, self._holdings
        holdings.close(account)  # of a lease that was renewed in time, what is left
        until_s = sent_s + SPAN_S if account.has_windows else FOREVER
        lease = account.lease = grant.lease(wish, sent_s, until_s, answer.now_ms)
        grant.tell(account, lease)
        if wish.waiters:
            account.quiet_ticks = 0
        if account.slot_ledgers:
            account.idle = grant.idle
            holdings.hold(account, sum(grant.verdicts) + grant.slots)
        for waiter, verdict in zip(wish.waiters, grant.verdicts, strict=True):
            if waiter.future.done():
                continue  # it left; what was meant for it is there for others, or goes back
            if verdict:
                waiter.future.set_result(account.spend(lease, waiter.tokens))
            else:
                self._refuse(account, waiter, grant.refused(account.limits, waiter.tokens, answer.now_ms))
        while lease.is_open and account.waiters:  # came meanwhile
            waiters, account.waiters = account.waiters, []
            ticket = account.admit(waiters[0].tokens)
            account.waiters = waiters
            if ticket is None:
                break
            first = waiters.pop(0)
            if first.future.done():
                ticket.settle(NOTHING_USED)
            else:
                first.future.set_result(ticket)
        if not account.waiters:
            self._asking.pop(account, None)
        if not lease.is_open:
            holdings.close(account)
        holdings.trim(account, account.idle)
        if lease.is_open or (account.slot_ledgers and account.idle):
            holdings.activate(account)
        self._arm(TICK_S)

    def _refuse(self, account: Account, waiter: Waiter, readings: list[Reading]) -> None:
        """Not before this process has given back what its other accounts have idle of the limits that are in the way,
        and others what they have on their way."""
        blocking = [i for i, reading in enumerate(readings) if not reading.passes]
        can_wait = all(readings[i].wait_s is not None for i in blocking)
        if can_wait and waiter.tries == 0:
            waiter.tries = 1
            if self._recall(account, blocking):
                self._ask(account, waiter)
                return
        is_shared = max(self.processes, self._expected) > 1
        if can_wait and waiter.tries == 1 and is_shared and not self._is_closed:
            waiter.tries = 2
            if any(account.limits[i].kind is not Kind.REQUESTS for i in blocking):
                if not self._later:
                    asyncio.get_running_loop().call_later(AGAIN_S, self._ask_again)
                self._later.append((account, waiter))
                return
        waiter.future.set_exception(refusal(readings, waiter.tokens))

    def _ask_again(self) -> None:
        later, self._later = self._later, []
        for account, waiter in later:
            if self._is_closed and not waiter.future.done():
                waiter.future.set_exception(unavailable())
            else:
                self._ask(account, waiter)

    def _recall(self, account: Account, blocking: list[int]) -> bool:
        lenders = self._holdings.lenders([account.ledgers[i] for i in blocking])
        lenders.discard(account)
        found = False
        for other in lenders:
            found = self._holdings.close(other) or found
            found = self._holdings.trim(other, 0) or found
            self._holdings.rest(other)
        return found

    def _fail(self, wishes: list[Wish]) -> None:
        """Redis did not answer: nothing is kept idle, and everybody who waits is decided about here."""
        for account in [*self._holdings.active, *(wish.account for wish in wishes)]:
            if account.slot_ledgers:
                account.idle = 0
                self._holdings.trim(account, 0)
        waiting = [(wish.account, waiter) for wish in wishes for waiter in wish.waiters]
        for account in self._asking:
            waiting += [(account, waiter) for waiter in account.waiters]
            account.waiters.clear()
        self._asking.clear()
        for account, waiter in waiting:
            if waiter.future.done():
                continue
            try:
                waiter.future.set_result(self._without_redis(account, waiter.tokens))
            except GatewayError as exc:
                waiter.future.set_exception(exc)

    # --- what goes on beside the requests -----------------------------------------------------------------------------

    def owe(self, account: Account, lease: Lease) -> None:
        """As `Keeper` says; at once where little is left of a limit."""
        self._holdings.owe(account, lease)
        self._arm(TICK_S)
        if lease.is_scarce and not self._link.is_away:
            self._is_urgent = True
            self._kick()

    def release(self, account: Account) -> None:
        """As `Keeper` says; at once."""
        if self._holdings.trim(account, account.idle):
            if self._link.is_away:
                self._arm(PROBE_S)
            else:
                self._kick()

    def _kick(self) -> None:
        """An exchange begins in the next turn of the loop, with all that gathers until then."""
        if self._pump is None and not self._is_closed:
            self._pump = asyncio.create_task(self._run(), name="budget-exchange")

    async def _run(self) -> None:
        try:
            while True:
                self._is_urgent = False
                await self._exchange()
                if not self._asking and not self._is_urgent and not self._holdings.is_due():
                    break
        except StoreUnavailable:
            self._arm(PROBE_S)  # the link has logged it
        except Exception:
            log.exception("a budget exchange failed")
            self._arm(PROBE_S)
        finally:
            self._pump = None

    def _arm(self, delay_s: float) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """Leases that end before the next tick are renewed; those that nobody uses go back, and so do idle slots."""
        self._timer = None
        has_returned = False
        now_s, holdings, is_away = self._clock(), self._holdings, self._link.is_away
        for account in list(holdings.active):
            lease = account.lease
            account.quiet_ticks = 0 if lease.spent > lease.seen else account.quiet_ticks + 1
            if account.has_windows and lease.is_open:
                ends = lease.until_s - now_s <= TICK_S
                if account.quiet_ticks >= QUIET_TICKS or (ends and (is_away or now_s >= lease.until_s)):
                    has_returned = holdings.close(account) or has_returned
                elif ends and lease.spent:
                    self._asking[account] = None
                elif ends:
                    has_returned = holdings.close(account) or has_returned
            if account.slot_ledgers:
                holdings.trim(account, min(account.idle, max(account.peak, account.peak_before) - account.running))
                account.peak_before, account.peak = account.peak, account.running
            lease.seen = lease.spent
            holdings.rest(account)
        self._owed_ticks = self._owed_ticks + 1 if holdings.owes() else 0
        if self._asking or has_returned or holdings.is_due() or self._owed_ticks >= OWED_TICKS:
            self._owed_ticks = 0
            self._kick()
        if holdings.active or holdings.owes():
            self._arm(TICK_S)

    async def renew(self, timeout_s: float | None = None) -> None:
        """Tell Redis that this process lives and what slots it holds, and all that is owed. Raises StoreUnavailable."""
        self._holdings.dirty.update(dict.fromkeys(self._holdings.holding))
        while True:
            await self._exchange(timeout_s)
            if not self._holdings.is_due() and not self._holdings.owes():
                return

    async def flush(self, timeout_s: float | None = None) -> None:
        """Give back every lease and slot that is not in use, and send all that is owed. Raises StoreUnavailable."""
        for account in list(self._holdings.active):
            self._holdings.close(account)
            self._holdings.trim(account, 0)
            self._holdings.rest(account)
        await self.renew(timeout_s)

    def start(self) -> None:
        """Begin to renew slots and to count as alive; in a running event loop, once."""
        self._keeper = asyncio.create_task(self._keep(), name="budget-renewal")

    async def _keep(self) -> None:
        while True:
            try:
                await self.renew()
            except StoreUnavailable:
                pass  # the link has logged it; what is owed is sent again by the timer
            except Exception:
                log.exception("renewing slots failed; the next try is in %.0f s", RENEW_S)
            await asyncio.sleep(RENEW_S)

    async def aclose(self, deadline_s: float = PATIENT_S) -> None:
        """End the background work, after at most `deadline_s` for what is owed. Nobody may wait for a ticket."""
        if self._keeper is not None:
            await end_task(self._keeper)
            self._keeper = None
        with contextlib.suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(deadline_s):
                await self.flush(PATIENT_S)
                await self._link.call(lambda redis: redis.zrem(GATEWAYS_KEY, self.process_id))
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pump is not None:
            await end_task(self._pump)
