"""`poolgate check` as a person runs it: bad configs and bad machines, each with its key path and the way out."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.line import write_config
from fakes.ports import free_port
from redis.asyncio import Redis

FAKE_VLLM = str(Path(sys.executable).with_name("poolgate-fake-engine"))
CANARY = "canary-5e0b7d"
WITHIN_S = 60.0


@dataclass
class Answer:
    code: int
    stdout: str
    stderr: str

    def finding(self, key: str) -> dict[str, Any]:
        """The only finding with this key path."""
        found = [f for f in json.loads(self.stdout)["findings"] if f["key"] == key]
        assert len(found) == 1, self.stdout
        return found[0]


async def poolgate(*words: str | Path, env: dict[str, str] | None = None) -> Answer:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environment(), **(env or {})},
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), WITHIN_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    return Answer(child.returncode, out.decode(), err.decode())


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("POOLGATE_", "HF_"))}


async def check(path: Path, env: dict[str, str] | None = None) -> Answer:
    return await poolgate("check", "--json", "--config", path, env=env)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory in which nothing is missing; the weights are zeros."""
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(bytes(4096))
    return folder


def sound(folder: Path, model: Path | str, **sections: Any) -> Path:
    """A config that this machine could run; `sections` replace whole sections."""
    return write_config(
        folder,
        **{
            "gateway": {"port": free_port(), "state_dir": "state"},
            "workers": {"vllm": FAKE_VLLM},
            "pools": {"a": {"model": str(model), "max_in_flight": 8, "replicas": [{"gpus": []}]}},
            "routes": {"chat": {"targets": [{"pool": "a"}]}},
            **sections,
        },
    )


async def test_a_sound_config_on_a_machine_that_can_run_it(tmp_path, model):
    path = sound(tmp_path, model)
    answer = await poolgate("check", "--config", path)
    assert answer.code == 0, answer.stdout
    assert answer.stdout.splitlines()[-1] == "Ready: nothing stands in the way of a start."
    assert answer.stderr == ""
    assert not (tmp_path / "state").exists()


GPU_0 = {"model": "org/name", "replicas": [{"gpus": [0]}]}


@pytest.mark.parametrize(
    ("sections", "key", "fact", "way_out"),
    [
        ({"gateway": {"prot": 1}}, "gateway.prot", "unknown key", "check its spelling"),
        (
            {"routes": {"chat": {"targets": [{"pool": "b"}]}}},
            "routes.chat.targets[0].pool",
            'no pool "b"',
            "pools are: a",
        ),
        (
            {
                "routes": {
                    "x": {"aliases": ["y"], "targets": [{"pool": "a"}]},
                    "y": {"aliases": ["x"], "targets": [{"pool": "a"}]},
                }
            },
            "routes.x.aliases[0]",
            "aliases of each other (a cycle)",
            "keep one as the route",
        ),
        (
            {"pools": {"a": GPU_0, "b": GPU_0}},
            "pools.b.replicas[0].gpus",
            "GPU 0 is used by more than one replica",
            "lower gpu_memory_utilization",
        ),
        ({"keys": {"k": {"key": CANARY}}}, "keys.k.key", "does not belong in this file in clear", "key_env, or sha256"),
        ({"gateway": {"host": "192.0.2.1"}}, "gateway.host", "cannot listen on 192.0.2.1", '"127.0.0.1"'),
        ({"gateway": {"state_dir": "config.toml"}}, "gateway.state_dir", "is a file", "to a directory"),
        ({"workers": {"vllm": "bin/vllm"}}, "workers.vllm", "bin/vllm does not exist", "venv"),
        ({"pools": {"a": {"model": "./none"}}}, "pools.a.model", "none does not exist", "correct the path"),
        ({"pools": {"a": {"model": "models/x/y"}}}, "pools.a.model", "is no directory", "give the model's directory"),
        ({"pools": {"a": {"model": "org/m-GGUF:Q4_K_M"}}}, "pools.a.model", "GGUF", "Hugging Face directories"),
        ({"pools": {"a": GPU_0}}, "pools.a.replicas[0].gpus", "shows no NVIDIA GPU", "remove gpus"),
        ({"redis": {"url": "unix:///no/redis.sock"}}, "redis.url", "cannot be reached", "start it"),
    ],
    ids=lambda value: value if isinstance(value, str) and "[" not in value else "",
)
async def test_an_error_names_its_key_and_the_way_out(tmp_path, model, sections, key, fact, way_out):
    answer = await check(sound(tmp_path, model, **sections), env={"PATH": ""})
    finding = answer.finding(key)
    assert (answer.code, finding["severity"]) == (1, "error")
    assert fact in finding["fact"]
    assert way_out in finding["way_out"]
    assert CANARY not in answer.stdout + answer.stderr


async def test_every_fault_of_a_config_is_told_at_once(tmp_path, model):
    path = sound(tmp_path, model, gateway={"port": 0, "hots": "x"}, classes={"c": {"priority": "high"}})
    answer = await check(path)
    assert {f["key"] for f in json.loads(answer.stdout)["findings"]} == {
        "gateway.port",
        "gateway.hots",
        "classes.c.priority",
    }


@pytest.mark.parametrize("text", ["[gateway", "\x00", "[gateway]\nport = 1\nport = 2"])
async def test_a_file_that_is_not_toml(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    answer = await check(tmp_path / "config.toml")
    assert answer.code == 1
    assert "is not TOML" in answer.finding(str(tmp_path / "config.toml"))["fact"]


async def test_a_file_that_is_missing(tmp_path):
    finding = (await check(tmp_path / "config.toml")).finding(str(tmp_path / "config.toml"))
    assert "cannot be read" in finding["fact"]
    assert "--config" in finding["way_out"]


async def test_a_taken_port_names_who_holds_it(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        answer = await check(sound(tmp_path, model, gateway={"port": port, "state_dir": "state"}))
    finding = answer.finding("gateway.port")
    assert (answer.code, finding["severity"]) == (1, "error")
    assert f"{port} on 127.0.0.1 is taken by pid {os.getpid()} (" in finding["fact"]
    assert "another port" in finding["way_out"]


async def test_a_port_that_the_running_gateway_of_this_config_holds_is_no_error(tmp_path, model):
    path = sound(tmp_path, model)
    port = int(next(line for line in path.read_text().splitlines() if "port" in line).split("=")[1])
    code = f"import socket, sys; s = socket.create_server(('127.0.0.1', {port})); print('up', flush=True); s.accept()"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "serve", "--config", "config.toml"), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), WITHIN_S) == b"up\n"
        answer = await check(path)
    finally:
        child.kill()
        await child.wait()
    assert (answer.code, answer.finding("gateway.port")["severity"]) == (0, "hint")
    assert f"pid {child.pid}" in answer.finding("gateway.port")["fact"]


async def test_a_gguf_file_and_a_folder_that_holds_only_gguf(tmp_path, model):
    (model / "model.safetensors").rename(model / "m.Q4_K_M.gguf")
    pools = {"file": {"model": str(model / "m.Q4_K_M.gguf")}, "folder": {"model": str(model)}}
    answer = await check(
        sound(tmp_path, model, pools=pools, routes={"r": {"targets": [{"pool": "file"}, {"pool": "folder"}]}})
    )
    assert answer.code == 1
    for key, fact in (("pools.file.model", "is a GGUF file"), ("pools.folder.model", "holds only GGUF")):
        assert fact in answer.finding(key)["fact"]
        assert "Hugging Face" in answer.finding(key)["way_out"]


async def test_a_model_that_misses_a_shard(tmp_path, model):
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    answer = await check(sound(tmp_path, model))
    assert answer.code == 1
    assert "misses model-00001-of-00002.safetensors" in answer.finding("pools.a.model")["fact"]


async def test_warnings_do_not_fail_the_check(tmp_path, model):
    path = sound(tmp_path, model, keys={"k": {"key_env": "NO_SUCH_VARIABLE_HERE"}})
    (model / "chat_template.jinja").unlink()
    answer = await check(path)
    assert answer.code == 0
    assert "the key is off" in answer.finding("keys.k.key_env")["fact"]
    assert "chat template" in answer.finding("pools.a.model")["fact"]


async def test_a_redis_that_can_be_used_is_no_finding(tmp_path, model, redis_url):
    answer = await check(sound(tmp_path, model, redis={"url": redis_url}))
    assert (answer.code, json.loads(answer.stdout)["findings"]) == (0, [])


async def test_a_redis_that_refuses_the_password_and_no_password_is_printed(tmp_path, model, own_redis):
    client = Redis.from_url(own_redis.url)
    await client.config_set("requirepass", CANARY)
    await client.aclose()
    for url, fact in (
        (own_redis.url, "password"),
        (f"unix://:{CANARY}-wrong@{own_redis.socket}", "refuses the user or password"),
    ):
        answer = await check(sound(tmp_path, model, redis={"url": url}))
        finding = answer.finding("redis.url")
        assert fact in finding["fact"] and str(own_redis.socket) in finding["fact"]
        assert "unix://USER:PASSWORD@/PATH" in finding["way_out"]
        assert CANARY not in answer.stdout + answer.stderr
    good = await check(sound(tmp_path, model, redis={"url": f"unix://:{CANARY}@{own_redis.socket}"}))
    assert good.code == 0


async def test_a_redis_that_forbids_scripts(tmp_path, model, own_redis):
    client = Redis.from_url(own_redis.url)
    await client.acl_setuser(
        "plain", enabled=True, passwords=[f"+{CANARY}"], keys=["*"], categories=["+@all", "-@scripting"]
    )
    await client.aclose()
    answer = await check(sound(tmp_path, model, redis={"url": f"unix://plain:{CANARY}@{own_redis.socket}"}))
    finding = answer.finding("redis.url")
    assert (answer.code, "run scripts" in finding["fact"]) == (1, True)
    assert "@scripting" in finding["way_out"]
    assert CANARY not in answer.stdout + answer.stderr


async def test_a_redis_that_is_frozen_is_told_within_the_deadline(tmp_path, model, own_redis):
    own_redis.freeze()
    finding = (await check(sound(tmp_path, model, redis={"url": own_redis.url}))).finding("redis.url")
    assert "it did not answer in time" in finding["fact"]


async def test_a_value_from_the_environment_is_shown_by_name(tmp_path, model):
    answer = await check(sound(tmp_path, model), env={"POOLGATE_GATEWAY__DRAIN_S": "5"})
    assert answer.code == 0
    assert "POOLGATE_GATEWAY__DRAIN_S" in answer.finding("gateway.drain_s")["fact"]


async def test_a_hub_name_without_a_hub_is_a_warning(tmp_path, model):
    pools = {"a": {"model": "org/name", "replicas": [{"gpus": []}]}}
    with tempfile.TemporaryDirectory() as cache:
        env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
        finding = (await check(sound(tmp_path, model, pools=pools), env=env)).finding("pools.a.model")
    assert finding["severity"] == "warning"
    assert "unset HF_HUB_OFFLINE" in finding["way_out"]


NVIDIA_SMI = """#!/bin/sh
case "$*" in
-L) echo 'GPU 0: NVIDIA H200 (UUID: GPU-875321da-1d5c-e31c-6059-5a63f92fa7d1)'
    echo '  MIG 1g.18gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)';;
*query-gpu*) echo '0, GPU-875321da-1d5c-e31c-6059-5a63f92fa7d1, 143771, 90000';;
*) echo 'GPU-875321da-1d5c-e31c-6059-5a63f92fa7d1, 812, 89000';;
esac
"""


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """Environment of a machine with one H200, of which pid 812 holds the larger part."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


async def test_gpus_are_held_against_what_nvidia_smi_shows(tmp_path, model, one_gpu):
    replicas = [{"gpus": [0]}, {"gpus": [1]}, {"gpus": ["MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"]}]
    path = sound(tmp_path, model, pools={"a": {"model": str(model), "max_in_flight": 8, "replicas": replicas}})
    answer = await check(path, env=one_gpu)
    assert answer.code == 1
    missing = answer.finding("pools.a.replicas[1].gpus")
    assert missing["fact"] == "no GPU 1 on this machine"
    assert "0 (NVIDIA H200, 143771 MiB, GPU-875321da" in missing["way_out"]
    assert "MIG-c6d4f1ef" in missing["way_out"]
    busy = answer.finding("pools.a.replicas[0].gpus")
    assert (busy["severity"], "pid 812 (89000 MiB)" in busy["fact"]) == ("warning", True)
    assert len(json.loads(answer.stdout)["findings"]) == 2


async def test_workers_that_take_the_first_gpu_by_default_must_fit_it(tmp_path, model, one_gpu):
    pools = {"a": {"model": str(model)}, "b": {"model": str(model)}}
    finding = (await check(sound(tmp_path, model, pools=pools), env=one_gpu)).finding("pools.b.replicas[0].gpus")
    assert finding["severity"] == "error"
    assert "shares sum to 1.84" in finding["fact"]
    assert "lower gpu_memory_utilization" in finding["way_out"]


async def test_up_refuses_with_the_same_lines_and_starts_nothing(tmp_path):
    path = sound(tmp_path, "./none")
    told = (await check(path)).finding("pools.a.model")
    answer = await poolgate("up", "--config", path)
    assert answer.code == 1
    assert f"pools.a.model: {told['fact']}; {told['way_out']}" in answer.stderr
    assert not (tmp_path / "state").exists()
