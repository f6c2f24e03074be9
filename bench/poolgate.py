"""Starts Poolgate with all that it does switched on, and the Redis that it needs. Called by rounds.py;
overload/gateway.py uses its parts.

On the way of every request: a key made at run time, limits of key and user that are charged and never refuse, slots of
the pool, an alias that becomes the engine's name, a cap on output tokens, an access record, metrics.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.children import ROOT, Child, Children, RunFailed
from bench.contender import POLL_S, Contender, free_port
from bench.fake_upstream import SERVED_NAME
from bench.request import Target
from workers.redis_binary import RedisFailed, find_binary

ALIAS = "bench-alias"
REDIS_START_S = 20.0
COMMAND_S = 60.0
REQUESTS_PER_MIN, TOKENS_PER_MIN, IN_FLIGHT = 500_000_000, 500_000_000_000, 500_000

_CONFIG = """\
[gateway]
port = {port}
processes = 1
drain_s = 1
state_dir = "{folder}/state"

[redis]
url = "unix://{socket}"

[classes.interactive]
priority = 0

[classes.batch]
priority = 10

[users.bench]
limits = {{ requests_per_min = {requests}, tokens_per_min = {tokens}, in_flight = {in_flight} }}

[pools.bench]
urls = ["http://127.0.0.1:{upstream_port}"]
served_name = "{served_name}"
max_model_len = 8192
max_in_flight = {in_flight}

[routes.bench]
aliases = ["{alias}"]
targets = [{{ pool = "bench" }}]
max_output_tokens = 1024
"""


def start(children: Children, folder: Path, upstream_port: int) -> Contender:
    redis, socket = start_redis(children, folder)
    port = free_port()
    config = folder / "config.toml"
    config.write_text(
        _CONFIG.format(
            port=port,
            folder=folder,
            socket=socket,
            requests=REQUESTS_PER_MIN,
            tokens=TOKENS_PER_MIN,
            in_flight=IN_FLIGHT,
            upstream_port=upstream_port,
            served_name=SERVED_NAME,
            alias=ALIAS,
        )
    )
    limits = ("--rpm", REQUESTS_PER_MIN, "--tpm", TOKENS_PER_MIN, "--in-flight", IN_FLIGHT)
    key = make_key(config, "bench", "--user", "bench", *limits)
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
    main = children.start(f"gateway-{folder.name}", command, cores=children.cores.measured, out="access.jsonl")
    return Contender("gateway", Target(port, ALIAS, key), main, [redis])


def start_redis(children: Children, folder: Path) -> tuple[Child, Path]:
    """An empty one and its socket, ready. Raises RunFailed where there is none to start."""
    socket = folder / "redis.sock"
    try:
        binary = str(find_binary())
    except RedisFailed as exc:
        raise RunFailed(str(exc)) from exc
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    child = children.start(f"redis-{folder.name}", [binary, *options], cores=children.cores.load)
    until = time.monotonic() + REDIS_START_S
    while not socket.exists():
        child.require_running()
        if time.monotonic() > until:
            raise RunFailed(f"redis-server was not ready within {REDIS_START_S:g} s")
        time.sleep(POLL_S)
    return child, socket


def make_key(config: Path, name: str, *options: object) -> str:
    """The key itself. Raises RunFailed where none could be made."""
    command = [sys.executable, "-m", "gateway", "keys", "create", name, "--config", config]
    done = subprocess.run(
        [str(word) for word in (*command, *options)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    if done.returncode != 0:
        raise RunFailed(f"no key could be made: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
