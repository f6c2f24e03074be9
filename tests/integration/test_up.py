"""`poolgate up` as a person uses it: ready block, first calls, Ctrl-C, deaths; fake engines stand in for vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.line import process, write_config
from fakes.ports import free_port
from fakes.up import READY_S, Running, is_gone, running_up
from fakes.waits import eventually

from gateway.config.load import load
from workers.ready_block import base_url

FAKE = str(Path(sys.executable).with_name("poolgate-fake-engine"))


def fake_model(folder: Path) -> Path:
    """A directory that looks like a model to the checks before a start."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64, "vocab_size": 100}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (model / "model.safetensors").write_bytes(b"")
    return model


def config_of(folder: Path, *, vllm_args: dict[str, Any] | None = None, **sections: Any) -> Path:
    """Pools of fake engines; one pool `tiny` unless told otherwise."""
    model = str(fake_model(folder))
    args = {"fake_load_s": 0.2} | (vllm_args or {})
    sections.setdefault("pools", {"tiny": {"model": model, "max_model_len": 2048, "vllm_args": args}})
    for pool in sections["pools"].values():
        pool.setdefault("model", model)
    return write_config(
        folder,
        gateway={"port": free_port(), "drain_s": 3},
        redis={"url": "embedded", "timeout_s": 2.0},
        workers={"vllm": FAKE, "stop_s": 5},
        **{"routes": {"chat": {"targets": [{"pool": pool} for pool in sections["pools"]]}}} | sections,
    )


async def test_ready_block_can_be_pasted_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path)) as up:
        text = up.text()
        curl = text[text.index("curl -sS") : text.index("  With the OpenAI SDK")]
        reply = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", curl], capture_output=True, text=True, timeout=30
        )
        assert json.loads(reply.stdout)["choices"][0]["message"]["content"]
        snippet = text[text.index("from openai import") : text.index("  Another terminal")]
        sdk = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60
        )
        assert sdk.returncode == 0, sdk.stderr
        assert sdk.stdout.strip()

        assert len(up.family()) >= 4  # up, redis, supervisor, gateway, worker
        assert await up.interrupt() == 0
        assert "nothing is left running" in up.text()
        assert up.family() == []


async def test_status_and_keys_work_beside_a_running_up(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path)) as up:
        status = await up.cli("status")
        assert status.returncode == 0, status.stderr
        assert re.search(r"^tiny +tiny/0@\S+ +ready ", status.stdout, re.MULTILINE)
        facts = json.loads((await up.cli("status", "--json")).stdout)
        assert facts["pools"]["tiny"][0]["state"] == "ready"
        assert "api_key" not in facts["pools"]["tiny"][0]
        created = await up.cli("keys", "create", "night-shift", "--rpm", "5")
        key = re.search(r"sk-pg-\S+", created.stdout)
        assert created.returncode == 0 and key is not None
        url = re.search(r"base URL +(\S+)", up.text())
        assert url is not None

        async def code() -> str:
            command = (
                f"curl -s -o /dev/null -w '%{{http_code}}' {url[1]}/models -H {shlex.quote('x-api-key: ' + key[0])}"
            )
            done = await asyncio.to_thread(subprocess.run, ["bash", "-c", command], capture_output=True, text=True)
            return done.stdout

        assert await code() == "200"
        listed = await up.cli("keys", "list")
        assert "night-shift" in listed.stdout and key[0] not in listed.stdout
        assert (await up.cli("keys", "revoke", "night-shift")).returncode == 0

        async def is_refused() -> bool:
            return await code() == "401"

        await eventually(is_refused, "a revoked key is refused", 5)
        assert key[0] not in "".join(path.read_text(errors="replace") for path in up.state.rglob("*.log"))


async def test_commands_say_what_to_do_when_nothing_runs(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path)) as up:
        assert await up.interrupt() == 0
        for command in (["status"], ["keys", "list"]):
            done = await up.cli(*command)
            assert done.returncode == 1
            assert "poolgate up" in done.stderr and "Traceback" not in done.stderr


async def test_first_key_is_the_same_at_the_second_start(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        async with running_up(config_of(tmp_path)) as up:
            text = up.text()
            keys += re.findall(r"API key +(\S+)", text)
            assert await up.interrupt() == 0
    assert len(set(keys)) == 1
    assert (tmp_path / ".poolgate/first.key").stat().st_mode & 0o777 == 0o600


async def test_killed_worker_comes_back_and_up_says_so(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path)) as up:
        before = json.loads((await up.cli("status", "--json")).stdout)["pools"]["tiny"][0]
        os.kill(before["pid"], signal.SIGKILL)
        await up.says(": backoff", 15)

        async def is_back() -> bool:
            now = json.loads((await up.cli("status", "--json")).stdout)["pools"]["tiny"][0]
            return bool(now["state"] == "ready" and now["pid"] != before["pid"] and now["restarts"] == 1)

        await eventually(is_back, "the worker is ready again", 30)


@pytest.mark.parametrize("part", ["serve", "workers"])
async def test_killed_part_is_started_again_and_calls_work(tmp_path: Path, part: str) -> None:
    async with running_up(config_of(tmp_path)) as up:
        [victim] = [p for p in up.family() if p.cmdline()[1:4] == ["-m", "gateway", part]]
        victim.kill()
        await up.says("ended with signal SIGKILL")

        async def works() -> bool:
            return (await up.cli("status")).returncode == 0 and await calls(up)

        await eventually(works, "calls work again", 30)
        assert await up.interrupt() == 0


async def calls(up: Running) -> bool:
    text = up.text()
    curl = text[text.index("curl -sS") : text.index("  With the OpenAI SDK")]
    reply = await asyncio.to_thread(subprocess.run, ["bash", "-c", curl], capture_output=True, text=True, timeout=30)
    return '"choices"' in reply.stdout


async def test_killed_up_takes_everything_along(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path)) as up:
        up.child.kill()
        await eventually(lambda: is_gone(up), "nothing is left of a killed up", 30)


async def test_worker_that_hangs_at_its_end_is_killed_within_the_deadline(tmp_path: Path) -> None:
    async with running_up(
        config_of(tmp_path, vllm_args={"fake_ignore_sigterm": True, "fake_orphan_child": True})
    ) as up:
        assert await up.interrupt() == 0
        assert up.family() == []


async def test_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path, vllm_args={"fake_itl_ms": 100, "fake_tokens": 1000})) as up:
        text = up.text()
        url, key = re.search(r"base URL +(\S+)", text), re.search(r"API key +(\S+)", text)
        assert url is not None and key is not None
        body = json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": "x"}]})
        stream = await asyncio.create_subprocess_exec(
            "curl", "-sN", f"{url[1]}/chat/completions", "-H", f"x-api-key: {key[1]}", "-d", body,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert stream.stdout is not None
        await stream.stdout.readline()
        up.child.send_signal(signal.SIGINT)
        await up.says("Ctrl-C again")
        up.child.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.child.wait(), 30) == 0
        assert "Stopping at once" in up.text()
        await stream.stdout.read()
        await stream.wait()


async def test_second_up_on_one_state_directory_is_refused(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path)) as up:
        config = up.config.with_name("other.toml")
        config.write_text(re.sub(r'"port" = \d+', f'"port" = {free_port()}', up.config.read_text()))
        async with process(["up", "--config", str(config)], tmp_path / "second.log") as (second, log):
            assert await asyncio.wait_for(second.wait(), 30) == 1
            assert f"pid {up.child.pid}" in log.read_text() and "Traceback" not in log.read_text()
        assert await calls(up)


async def test_worker_that_cannot_start_is_named_with_its_cause_and_log(tmp_path: Path) -> None:
    bad = {"fake_exit_code_on_start": 1, "fake_log_line": "ValueError: the weights are made of cheese"}
    pools = {"good": {"vllm_args": {"fake_load_s": 0.1}}, "bad": {"vllm_args": bad}}
    async with running_up(config_of(tmp_path, pools=pools)) as up:
        text = up.text()
        assert re.search(r"bad/0@\S+: (backoff|failed).*made of cheese", text)
        assert await calls(up)

        async def is_named() -> bool:  # between two starts, which fail within a second each
            status = await up.cli("status")
            return status.returncode == 3 and "made of cheese" in status.stdout

        await eventually(is_named, "status names the cause", READY_S)


async def test_progress_shows_each_worker_with_its_elapsed_time(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path, vllm_args={"fake_load_s": 7})) as up:
        text = up.text()
        assert re.search(r"tiny/0@\S+ +starting +[5-9] s", text)


async def test_call_to_a_pool_that_still_loads_is_a_503_with_state_and_retry_after(tmp_path: Path) -> None:
    async with running_up(config_of(tmp_path, vllm_args={"fake_load_s": 60}), ready_s=None) as up:
        await up.says("starting")
        url = base_url(load(up.config).config)
        key_file = up.state / "first.key"

        async def has_key() -> bool:
            return key_file.exists()

        await eventually(has_key, "the first key is there", READY_S)
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            headers = {"x-api-key": key_file.read_text().strip()}

            async def refusal() -> httpx.Response | None:
                body = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}
                reply = await client.post(f"{url}/chat/completions", json=body, headers=headers)
                return reply if "starting" in reply.text else None

            reply = await eventually(refusal, "the refusal names the state", READY_S)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            models = (await client.get(f"{url}/models", headers=headers)).json()
            assert models["data"][0]["state"] == "starting"
        assert await up.interrupt() == 0


async def test_bad_config_starts_nothing(tmp_path: Path) -> None:
    for extra, says in (
        ({"gateway": {"prot": 1}}, "gateway.prot: unknown key"),
        ({"routes": {"chat": {"targets": [{"pool": "nope"}]}}}, 'routes.chat.targets[0].pool: no pool "nope"'),
    ):
        sections: dict[str, Any] = {
            "pools": {"a": {"model": str(fake_model(tmp_path))}},
            "routes": {"chat": {"targets": [{"pool": "a"}]}},
        }
        config = write_config(tmp_path, **(sections | extra))
        async with process(["up", "--config", str(config)], tmp_path / "log") as (child, log):
            assert await asyncio.wait_for(child.wait(), 30) == 1
            assert says in log.read_text() and "Traceback" not in log.read_text()
        assert not (tmp_path / ".poolgate").exists()
