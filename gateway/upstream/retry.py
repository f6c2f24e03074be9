"""May a request that failed at one replica go to another? Pure decisions and the budget for them; for attempt.py."""

from __future__ import annotations

from gateway.config.schema import RetrySection
from gateway.domain.errors import ConnectFailed, EngineDied, Retry, UpstreamBroken, UpstreamError, UpstreamTimeout

MAX_REFUSED = 4  # refused connections: no engine saw the request, but it does not go on for ever
BURST = 10.0  # further attempts that a quiet process may begin at once


def never_connected(error: Exception) -> bool:
    """Refused, or no answer within the connect deadline (a host that is off the network): no engine saw the request."""
    return isinstance(error, ConnectFailed) or (isinstance(error, UpstreamTimeout) and error.deadline == "connect")


def other_may_mend(error: UpstreamError, *, replay_in_flight: bool) -> bool:
    """Could another replica do better, and is it safe to ask one?

    1. Nobody has seen the request: yes.
    2. The engine said that it failed, is busy, or gave up: yes.
    3. The connection broke, or the engine died, while it had the request: the request may be what killed it, so only
       where the config says so.
    4. A deadline passed: the time is gone, and the engine may still be at work on it.
    """
    if never_connected(error) or error.retry is Retry.OTHER_REPLICA:
        return True
    if isinstance(error, UpstreamBroken):
        return not error.request_sent or replay_in_flight
    return isinstance(error, EngineDied) and replay_in_flight


class RetryBudget:
    """Further attempts may be a share of all requests, so that a fleet in trouble does not get twice the load."""

    __slots__ = ("_level", "_share")

    def __init__(self, section: RetrySection) -> None:
        self._share = section.share
        self._level = BURST if section.share > 0 else 0.0

    def request(self) -> None:
        """A request began."""
        self._level = min(BURST, self._level + self._share)

    def take(self) -> bool:
        """Whether one more attempt may begin; then it is counted."""
        if self._level < 1:
            return False
        self._level -= 1
        return True
