"""The fake engine's life as a process, against what the supervisor relies on in vLLM's."""

from __future__ import annotations

import os
import signal

from fakes.engine import running_fake_engine

CHAT = "/v1/chat/completions"


def _chat(engine, **fields):
    return {"model": engine.name, "messages": [{"role": "user", "content": "Say hi."}], **fields}


async def test_sigterm_when_idle_ends_with_code_0():
    async with running_fake_engine() as engine:
        os.kill(engine.pid, signal.SIGTERM)
        assert await engine.exit_code() == 0
