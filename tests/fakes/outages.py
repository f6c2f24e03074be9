"""What tests of Redis outages look for: whether Redis decides again, and what was logged of it."""

from __future__ import annotations

import re

import pytest
from fakes.budget_world import reserve, scope, second_of, used

from gateway.admission.budget import Budget
from gateway.domain.errors import StoreUnavailable


async def uses_redis(budget: Budget) -> bool:
    """Whether a decision is made in Redis; leaves no slot behind."""
    try:
        ticket = await reserve(budget, [scope("key:probe", slots=1000)])
    except StoreUnavailable:
        return False
    ticket.settle(used(0))
    return second_of(ticket) is not None


def told_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """ "away" and "back" as the log has them."""
    return re.findall(r"Redis is (away|back)", "\n".join(record.getMessage() for record in caplog.records))
