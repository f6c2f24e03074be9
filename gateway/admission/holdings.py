"""What this process holds of the shared budgets and what it owes them: leases, slots, corrections. For budget.py.

Pure bookkeeping: nothing waits here, the clock's reading is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.admission.account import FOREVER, Account, Lease
from gateway.admission.exchange import GiveBack
from gateway.admission.limits import PERIODS
from gateway.admission.local import Ledger
from gateway.admission.period import PeriodUse

MAX_ENTRIES = 500  # of one give-back
MAX_GIVES = 8
MAX_DEBTS = 10_000
MAX_SLOTS = 500  # ledgers told of in one exchange
GIVES_S = 3600  # a give-back is repeated for so long; budget.lua knows a little longer what it has done
HOUR_S = 3600  # days and months begin with an hour


class Holdings:
    def __init__(self) -> None:
        self.active: dict[Account, None] = {}  # with a lease that is open, or with idle slots
        self._lenders: dict[Ledger, set[Account]] = {}  # the active accounts of each; no empty sets
        self.holding: set[Ledger] = set()  # of which slots are held
        self.dirty: dict[Ledger, None] = {}  # of which Redis may believe something else than `held`
        self._owing: dict[Lease, Account] = {}
        self._debts: dict[tuple[str, int], list[int]] = {}  # (key, second) → delta, delta of what was taken ahead
        self._gives: list[GiveBack] = []  # sent, or about to be, and not confirmed

    def is_due(self) -> bool:
        """Somebody may wait for it, or Redis has not confirmed it."""
        return bool(self.dirty or self._gives)

    def owes(self) -> bool:
        return bool(self._debts or self._owing)

    # --- slots --------------------------------------------------------------------------------------------------------

    def hold(self, account: Account, slots: int) -> None:
        """So many more (or fewer) slots of the account's limits."""
        if not slots or not account.slot_ledgers:
            return
        account.slots += slots
        for ledger in account.slot_ledgers:
            ledger.held += slots
            if ledger.held > 0:
                self.holding.add(ledger)
            else:
                self.holding.discard(ledger)

    def trim(self, account: Account, idle: int) -> bool:
        """Give back what is idle beyond `idle` slots; whether there was any."""
        excess = account.slots - account.running - idle
        if excess <= 0 or not account.slot_ledgers:
            return False
        self.hold(account, -excess)
        self.dirty.update(dict.fromkeys(account.slot_ledgers))
        return True

    # --- leases -------------------------------------------------------------------------------------------------------

    def activate(self, account: Account) -> None:
        self.active[account] = None
        for ledger in account.ledgers:
            self._lenders.setdefault(ledger, set()).add(account)

    def lenders(self, ledgers: Iterable[Ledger]) -> set[Account]:
        """The active accounts that hold units or slots of one of these ahead of need."""
        return {account for ledger in ledgers for account in self._lenders.get(ledger, ())}

    def rest(self, account: Account) -> None:
        """If it keeps nothing for requests to come. A slot that comes free from then on goes back at once."""
        if account.has_windows and account.lease.is_open:
            return
        if account.slot_ledgers:
            if account.slots > account.running:
                return
            account.idle = 0
        self.active.pop(account, None)
        for ledger in account.ledgers:
            if (lenders := self._lenders.get(ledger)) is not None:
                lenders.discard(account)
                if not lenders:
                    del self._lenders[ledger]

    def close(self, account: Account) -> bool:
        """What is left of the lease goes back to its bucket; whether anything was. Spending from it ends."""
        lease = account.lease
        if not account.has_windows or lease.until_s == -FOREVER:
            return False
        self.note(account)
        requests = lease.requests if account.request_ledgers else 0
        tokens = lease.tokens if account.token_ledgers else 0
        lease.given_requests -= lease.requests  # what was spent stays known
        lease.given_tokens -= lease.tokens
        lease.requests = lease.tokens = 0
        lease.until_s = -FOREVER
        lease.is_open = False
        if lease.bucket_s is None:
            return False
        ahead_requests, ahead_tokens = lease.ahead
        for ledger in account.request_ledgers:
            self._debt(ledger, lease.bucket_s, -requests, -ahead_requests)
        for ledger in account.token_ledgers:
            self._debt(ledger, lease.bucket_s, -tokens, -ahead_tokens)
        return bool(requests or tokens or ahead_requests)

    def note(self, account: Account) -> None:
        """The ledgers' own windows learn what was spent from the lease."""
        lease = account.lease
        spent = lease.spent
        if spent != lease.noted_requests:
            for ledger in account.request_ledgers:
                ledger.window.add(int(lease.taken_s), spent - lease.noted_requests)
            lease.noted_requests = spent
        tokens = lease.given_tokens - lease.tokens
        if tokens != lease.noted_tokens:
            for ledger in account.token_ledgers:
                ledger.window.add(int(lease.taken_s), tokens - lease.noted_tokens)
            lease.noted_tokens = tokens

    # --- what is owed -------------------------------------------------------------------------------------------------

    def owe(self, account: Account, lease: Lease) -> None:
        self._owing[lease] = account

    def gather(self) -> None:
        """Turn what settled tickets owe into corrections, one per bucket.

        What was admitted without Redis is corrected only in days and months, which learn of it (see `charge_later`).
        """
        for lease, account in self._owing.items():
            if account.lease is lease:
                self.note(account)  # a correction finds what it corrects
            for ledger in account.token_ledgers:
                ledger.window.add(int(lease.taken_s), lease.debt)
                if lease.bucket_s is not None:
                    self._debt(ledger, lease.bucket_s, lease.debt, 0)
                elif isinstance(ledger.window, PeriodUse):
                    self._debt(ledger, ledger.window.second(lease.taken_s), lease.debt, 0)
            if lease.debt_requests:
                for ledger in account.request_ledgers:
                    ledger.window.add(int(lease.taken_s), lease.debt_requests)
                    if lease.bucket_s is not None:
                        self._debt(ledger, lease.bucket_s, lease.debt_requests, 0)
            lease.debt = lease.debt_requests = 0
        self._owing.clear()

    def charge_later(self, account: Account, now_s: float, tokens: int) -> None:
        """Days and months learn of what was admitted without Redis when it is back; a minute is over by then."""
        for ledger in account.token_ledgers:
            if isinstance(ledger.window, PeriodUse):
                self._debt(ledger, ledger.window.second(now_s), tokens, 0)

    def _debt(self, ledger: Ledger, bucket_s: int, delta: int, ahead: int) -> None:
        if not delta and not ahead:
            return
        if ledger.kind in PERIODS and not ahead:
            bucket_s -= bucket_s % HOUR_S  # all hours of a period are one: a long outage leaves few debts
        debt = self._debts.get((ledger.key, bucket_s))
        if debt is not None:
            debt[0] += delta
            debt[1] += ahead
            return
        if len(self._debts) >= MAX_DEBTS:
            self._debts.pop(next(iter(self._debts)))  # the oldest; a minute forgets it anyway
        self._debts[ledger.key, bucket_s] = [delta, ahead]

    def gives(self, number: int, now_s: float) -> list[GiveBack]:
        """All that an exchange of this number carries back; nothing that was first sent more than GIVES_S ago.

        What belongs to a minute that is over does no harm: Redis passes over it.
        """
        self._gives = [give for give in self._gives if now_s - give.since_s <= GIVES_S]
        self.gather()
        while self._debts and len(self._gives) < MAX_GIVES:
            some = list(self._debts.items())[:MAX_ENTRIES]
            for place, _ in some:
                del self._debts[place]
            entries = [(key, bucket_s, delta, ahead) for (key, bucket_s), (delta, ahead) in some if delta or ahead]
            if entries:
                self._gives.append(GiveBack(number, now_s, entries))
        return list(self._gives)

    def confirm(self, gives: list[GiveBack]) -> None:
        done = {id(give) for give in gives}
        self._gives = [give for give in self._gives if id(give) not in done]

    def slots(self, touched: list[Account]) -> list[Ledger]:
        """The ledgers whose slots an exchange tells: those that `touched` take from, and others that are due."""
        ledgers = dict.fromkeys(ledger for account in touched for ledger in account.slot_ledgers)
        for ledger in list(self.dirty):
            if len(ledgers) >= MAX_SLOTS:
                break
            ledgers[ledger] = None
        for ledger in ledgers:
            self.dirty.pop(ledger, None)
        return list(ledgers)
