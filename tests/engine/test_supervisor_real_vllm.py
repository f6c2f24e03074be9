"""The supervisor over the real vLLM on the CPU: start, a killed engine, recovery, stop; nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from fakes.worker_program import SupervisorUnderTest, is_alive, until
from redis.asyncio import Redis

from gateway.config.load import parse
from gateway.domain.replica import ReplicaState
from workers import proc

START_S = 180.0  # 22 s on an idle machine

pytestmark = pytest.mark.engine


def processes(session: int) -> dict[int, str]:
    """Living processes of one worker and their command lines."""
    rows = [row for row in proc.table().values() if row.session == session and not row.is_zombie]
    return {row.pid: Path(f"/proc/{row.pid}/cmdline").read_bytes().decode(errors="replace") for row in rows}


async def answer(url: str, key: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        return await client.post(
            f"{url}/v1/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": "tiny", "prompt": "1 2 3", "max_tokens": 4},
        )


async def test_a_killed_engine_is_replaced_and_a_stop_leaves_no_process(vllm_command, models_dir, tmp_path):
    loaded = parse(
        {
            "workers": {"vllm": vllm_command, "load_s": START_S},
            "pools": {
                "tiny": {
                    "model": str(models_dir / "tiny-random"),
                    "dtype": "bfloat16",
                    "max_model_len": 512,
                    "vllm_args": {"enforce_eager": True, "kv_cache_memory_bytes": 67_108_864},
                    "replicas": [{"gpus": []}],
                }
            },
            "routes": {"tiny": {"targets": [{"pool": "tiny"}]}},
        },
        tmp_path / "config.toml",
    )
    absent = Redis.from_url(f"unix://{tmp_path}/redis.sock", socket_timeout=0.2, retry=None)
    async with SupervisorUnderTest(loaded, absent) as run:
        first = await run.is_in(ReplicaState.READY, START_S)
        assert (first.max_model_len, first.load is not None) == (512, True)
        assert (await answer(first.url, first.api_key)).json()["usage"]["completion_tokens"] == 4
        family = processes(first.pid)
        assert not any(first.api_key in line for line in family.values())

        engine = next(pid for pid, line in family.items() if "EngineCore" in line)
        os.kill(engine, signal.SIGKILL)
        await until(lambda: run.record.state is ReplicaState.BACKOFF, 15)
        await until(lambda: run.record.state is ReplicaState.STARTING, 15)
        assert not any(is_alive(pid) for pid in family)

        second = await run.is_in(ReplicaState.READY, START_S)
        assert second.restarts == 1 and second.api_key == first.api_key  # else vLLM 0.26 compiles anew
        assert (await answer(second.url, second.api_key)).status_code == 200
        family = processes(second.pid)
        assert len(family) >= 3
        await run.stop()
        assert not any(is_alive(pid) for pid in family)
    await absent.aclose()
