"""Prompts near the window through a real gateway: how often its engine is asked to count them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fakes.engine import running_fake_engine
from fakes.line import running_gateway


async def test_an_engine_counts_a_prompt_once_for_all_who_send_it(tmp_path: Path, redis_process: Any) -> None:
    async with (
        running_fake_engine("--max-model-len", "512", name="tiny", key="") as engine,
        running_gateway(
            tmp_path, redis_process.url, pools={"tiny": {"urls": [engine.url], "max_model_len": 512}}
        ) as gateway,
    ):
        near = [{"role": "user", "content": "word " * 150}]
        replies = await asyncio.gather(*(gateway.chat(messages=near) for _ in range(5)))
        replies.append(await gateway.chat(messages=near, max_tokens=5))
        assert [reply.status_code for reply in replies] == [200] * 6
        assert (await engine.state())["calls"]["POST /tokenize"] == 1
        assert (await gateway.chat(messages=[*near, *near])).status_code == 200
        assert (await engine.state())["calls"]["POST /tokenize"] == 2
