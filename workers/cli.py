"""`poolgate workers`: the supervisor alone. Found by the gateway's command line through an entry point."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import click

from gateway.config.load import LoadedConfig, load
from gateway.config.option import config_option
from gateway.config.parent import PARENT_VARIABLE, follow_parent
from gateway.config.store import connect
from gateway.domain.errors import ConfigError, WorkerError
from workers import preflight
from workers.finding import Part
from workers.gpu import GpuDesk, list_cards
from workers.parent import adopt_orphans
from workers.spec import specs_of
from workers.supervisor import Supervisor

STORE_TIMEOUT_S = 2.0


@click.command()
@config_option
def workers(path: Path) -> None:
    """Run the vLLM workers of this machine.

    Starts one `vllm serve` for each replica of each pool that has a `model`, restarts those that die, and tells the
    gateways through Redis which of them are ready. Use it on every GPU host; `poolgate up` runs it for you on one
    machine.

    Ctrl-C or SIGTERM stops all workers: they take no new requests, finish the running ones (up to gateway.drain_s
    seconds) and are ended (after workers.stop_s seconds by force). A second Ctrl-C does not wait for running requests.
    The output of each worker is in logs/POOL-NUMBER.log of the state directory.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per probe otherwise
    try:
        loaded = load(path)
        # under `up`, which has checked already, one model that went away must not keep the others from coming back
        if PARENT_VARIABLE not in os.environ and (errors := preflight.errors(loaded, (Part.WORKERS,))):
            raise ConfigError(errors)
        asyncio.run(_supervise(loaded))
    except ConfigError as exc:
        for finding in exc.findings:
            click.echo(f"config error: {finding}", err=True)
        sys.exit(1)
    except WorkerError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(1)


async def _supervise(loaded: LoadedConfig) -> None:
    stop = asyncio.Event()
    supervisor: Supervisor | None = None

    def on_signal() -> None:
        if supervisor is not None:
            supervisor.request_stop(hurry=stop.is_set())
        stop.set()

    # Handlers come first: a stop must work at any moment, and a SIGINT that was ignored when we were started (nohup, &)
    # would be ignored by the workers as well. A handler is reset to the default in a child, an ignored signal is not.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # HUP: the terminal was closed
        loop.add_signal_handler(number, on_signal)
    adopt_orphans()
    if not follow_parent():
        return
    cards = await list_cards()
    host = socket.gethostname()
    async with contextlib.aclosing(connect(loaded, timeout_s=STORE_TIMEOUT_S)) as store:
        supervisor = Supervisor(loaded, specs_of(loaded, host, len(cards)), store, host=host, gpus=GpuDesk(cards))
        if stop.is_set():
            supervisor.request_stop()
        await supervisor.run()
