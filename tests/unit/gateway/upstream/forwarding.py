"""One reply on its way to one caller through forward(): what the tests of forward.py share."""

from __future__ import annotations

import json
from typing import Any

from fakes.story import FakeCaller, FakeReply, Silence, a_record, a_request, event, replica

from gateway.domain.outcome import Outcome
from gateway.domain.request import InferenceRequest
from gateway.upstream.forward import forward
from gateway.upstream.journey import Journey

ABORT_EVENT = event("", "abort")
ERROR_EVENT = b'data: {"error":{"message":"out of memory","type":"InternalServerError","code":500}}\n\n'
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEATH_EVENT = (
    b'data: {"error":{"message":"%b","type":"InternalServerError","param":null,"code":500}}\n\n' % DEATH.encode()
)


class Exchange:
    """One reply on its way to one caller."""

    def __init__(self, *parts: bytes | Exception | Silence, status: int = 200, **fields: Any) -> None:
        self.reply = FakeReply(*parts, status=status)
        self.request: InferenceRequest = a_request(**fields)
        self.caller = FakeCaller()
        self.log = self.caller.log
        self.journey = Journey(
            self.request, self.caller, a_record(), lambda _: b"", self._settle, prompt_tokens=30, was_clamped=False
        )

    async def run(self, *, was_clamped: bool = False) -> Outcome:
        self.journey.was_clamped = was_clamped
        return await forward(self.journey, self.reply, replica("a/0@h"))

    def _settle(self, outcome: Outcome) -> None:
        self.log.append(f"settled {outcome.ending} {outcome.usage}")


def stream(*parts: bytes | Exception | Silence, **fields: Any) -> Exchange:
    return Exchange(*parts, stream=True, **fields)


TWO = (event("Hel"), event("lo", "stop"))
SETTLED = "settled completed Usage(prompt_tokens=7, completion_tokens=2)"


def error_body(status: int, message: str = "no") -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": "x", "code": status}}).encode()
