"""Limits through real gateways: 429 with the time and the headers, one limit over two gateways."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.engine import running_fake_engine
from fakes.line import KEY, LIMITED, running_gateway, sha256
from fakes.waits import eventually


async def test_limits_answer_429_with_the_time_and_the_headers(tmp_path: Path, redis_url: str) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            keys={
                "requests": {"sha256": sha256(KEY), "limits": {"requests_per_min": 3}},
                "tokens": {"sha256": sha256(LIMITED), "limits": {"tokens_per_min": 200}},
                "day": {"sha256": sha256("sk-day"), "limits": {"tokens_per_day": 100, "tokens_per_month": 10**6}},
                "a": {"sha256": sha256("sk-user-key-a"), "user": "alice"},
                "b": {"sha256": sha256("sk-user-key-b"), "user": "alice"},
            },
            users={"alice": {"limits": {"requests_per_min": 2}}},
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}},
        ) as gateway,
    ):
        remaining = []
        for _ in range(3):
            reply = await gateway.chat()
            assert reply.status_code == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "3"
            remaining.append(int(reply.headers["x-ratelimit-remaining-requests"]))
        assert remaining == [2, 1, 0]
        refused = await gateway.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 62
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"

        # streams are charged with the engine's own count, in both paths
        for path in ("/v1/chat/completions", "/v1/completions"):
            await gateway.events(LIMITED, path, max_tokens=5)
        left = int((await gateway.chat(LIMITED, max_tokens=1)).headers["x-ratelimit-remaining-tokens"])

        async def three_records() -> list[int]:
            records = [r for r in gateway.access_lines() if r["key_id"] == "tokens"]
            return [r["prompt_tokens"] + r["completion_tokens"] for r in records] if len(records) == 3 else []

        spent = sum(await eventually(three_records, "access records"))
        assert spent > 0 and 200 - left < 2 * spent + 60
        too_many = await gateway.chat(LIMITED, max_tokens=199)
        assert too_many.status_code == 429

        # a day ends at 00:00 UTC; x-ratelimit-* are about minutes
        passed = await gateway.chat("sk-day", max_tokens=5)
        over = await gateway.chat("sk-day", max_tokens=75)
        assert (passed.status_code, over.status_code) == (200, 429)
        assert "100 tokens a day, is used up" in over.json()["error"]["message"]
        assert 1 <= int(over.headers["retry-after"]) <= 86_400
        assert not [name for name in (*passed.headers, *over.headers) if name.startswith("x-ratelimit-")]
        never = await gateway.chat("sk-day", max_tokens=101)
        assert (never.status_code, "retry-after" in never.headers) == (429, False)

        # a user's limit is shared by the keys of the user
        assert [(await gateway.chat(f"sk-user-key-{k}")).status_code for k in "aba"] == [200, 200, 429]


async def test_limit_holds_over_two_gateways(tmp_path: Path, redis_url: str) -> None:
    keys = {"test": {"sha256": sha256(KEY), "limits": {"requests_per_min": 10}}}
    async with running_fake_engine(name="tiny", key="") as engine:
        pools = {"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}}
        async with (
            running_gateway(tmp_path / "a", redis_url, keys=keys, pools=pools) as one,
            running_gateway(tmp_path / "b", redis_url, keys=keys, pools=pools) as two,
        ):
            replies = await asyncio.gather(*((one, two)[i % 2].chat() for i in range(30)))
    assert sorted(reply.status_code for reply in replies) == [200] * 10 + [429] * 20
