"""Keys of real gateways: what one command changes holds in every process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from fakes.engine import running_fake_engine
from fakes.line import process, running_gateway
from fakes.waits import eventually


async def test_a_revoked_key_is_refused_by_every_process(tmp_path: Path, redis_url: str) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            gateway={"processes": 4},
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny"}},
        ) as gateway,
    ):

        async def keys(*words: str) -> str:
            arguments = ["keys", *words, "--config", str(gateway.config)]
            async with process(arguments, tmp_path / "keys.log") as (child, log):
                assert await asyncio.wait_for(child.wait(), 30) == 0, log.read_text()
            return log.read_text()

        key = next(word for word in (await keys("create", "guest")).split() if word.startswith("sk-"))

        async def statuses() -> set[int]:
            """Over connections of their own, which reach all of the processes."""

            async def one() -> int:
                async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
                    headers = {"Authorization": f"Bearer {key}"}
                    url = gateway.url + "/v1/chat/completions"
                    return (await client.post(url, json=body, headers=headers)).status_code

            return set(await asyncio.gather(*(one() for _ in range(24))))

        assert await statuses() == {200}
        await keys("revoke", "guest")

        async def is_refused() -> bool:
            return await statuses() == {401}

        await eventually(is_refused, "all processes refuse the key")
        assert await statuses() == {401}
