"""Decides about a request without Redis: by this process's share of each limit, and what it has let through itself.

Called by budget.py while Redis is away under `on_outage = "share"`. Pure bookkeeping: nothing waits here.
"""

from __future__ import annotations

from gateway.admission.account import Account, Lease, Ticket
from gateway.admission.holdings import Holdings
from gateway.admission.limits import TOKEN_KINDS, Reading, rate_state, refusal


def admit_alone(account: Account, tokens: int, holdings: Holdings, processes: int, now_s: float) -> Ticket:
    """One request of `tokens` in all limits of the account. Raises LimitExceeded.

    `processes` share each limit. What is admitted Redis learns of when it is back, as far as that still matters.
    """
    holdings.gather()
    for other in holdings.active:
        holdings.note(other)
    holdings.note(account)
    readings = read_alone(account, tokens, 1, processes, now_s)
    if not all(reading.passes for reading in readings):
        raise refusal(readings, tokens)
    for ledger in account.request_ledgers:
        ledger.window.add(int(now_s), 1)
    for ledger in account.token_ledgers:
        ledger.window.add(int(now_s), tokens)
    holdings.charge_later(account, now_s, tokens)
    holdings.hold(account, 1)
    holdings.dirty.update(dict.fromkeys(account.slot_ledgers))
    rate = rate_state(read_alone(account, 0, 0, processes, now_s))
    return account.spend(Lease(None, now_s, now_s, 1, tokens, rate), tokens)


def read_alone(account: Account, tokens: int, requests: int, processes: int, now_s: float) -> list[Reading]:
    """Where each limit stands for so much more."""
    return [
        ledger.read(limit, tokens if limit.kind in TOKEN_KINDS else requests, processes, now_s)
        for limit, ledger in zip(account.limits, account.ledgers, strict=True)
    ]
