"""Starts Poolgate with a pool bounded to what its engines serve, and a key for each caller. Called by rounds.py.

Batch may wait only in numbers that its share of the capacity works off in a second or two: the rest is refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.children import Children
from bench.contender import Contender, free_port
from bench.fake_upstream import SERVED_NAME
from bench.overload.arrivals import CALLERS
from bench.overload.capacity import SLOTS
from bench.poolgate import make_key, start_redis
from bench.request import Target

ROUTE = "bench"

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
queue_s = 8
queue_max = 256

[classes.batch]
priority = 10
queue_s = 8
queue_max = 64

{users}

[pools.bench]
urls = [{urls}]
served_name = "{served_name}"
max_model_len = 8192
max_in_flight = {slots}

[routes.{route}]
targets = [{{ pool = "bench" }}]
"""


def config_text(port: int, folder: Path, socket: Path, upstream_ports: Sequence[int]) -> str:
    return _CONFIG.format(
        port=port,
        folder=folder,
        socket=socket,
        users="\n".join(f"[users.{caller.name}]" for caller in CALLERS),
        urls=", ".join(f'"http://127.0.0.1:{each}"' for each in upstream_ports),
        served_name=SERVED_NAME,
        slots=SLOTS,
        route=ROUTE,
    )


def start(children: Children, folder: Path, upstream_ports: Sequence[int]) -> tuple[Contender, dict[str, str]]:
    """With caller → key."""
    redis, socket = start_redis(children, folder)
    port = free_port()
    config = folder / "config.toml"
    config.write_text(config_text(port, folder, socket, upstream_ports))
    keys = {
        caller.name: make_key(config, caller.name, "--user", caller.name, "--class", caller.class_name)
        for caller in CALLERS
    }
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
    main = children.start(f"gateway-{folder.name}", command, cores=children.cores.measured, out="access.jsonl")
    target = Target(port, ROUTE, keys[CALLERS[0].name])
    return Contender("gateway", target, main, [redis]), keys
