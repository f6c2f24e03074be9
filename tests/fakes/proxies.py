"""What stands between callers and the gateway: a balancer that cuts idle connections, and nginx as it comes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fakes.ports import free_port

START_S = 15.0


@asynccontextmanager
async def idle_timeout_proxy(upstream: str, *, idle_s: float) -> AsyncIterator[str]:
    """Passes bytes on both ways and cuts a connection on which the gateway sent nothing for `idle_s`; its url."""
    host, _, port = upstream.removeprefix("http://").rpartition(":")
    running: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle_s: float | None) -> None:
        with suppress(TimeoutError, ConnectionError):
            while data := await asyncio.wait_for(reader.read(65_536), idle_s):
                writer.write(data)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection(host, int(port))
        up = asyncio.create_task(pass_on(reader, ahead, None))
        try:
            await pass_on(behind, writer, idle_s)
        finally:
            up.cancel()
            for end in (writer, ahead):
                end.transport.abort()
            await asyncio.gather(up, return_exceptions=True)

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


_NGINX = """\
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
worker_processes 1;
{user}
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {upstream};
        }}
    }}
}}
"""


@asynccontextmanager
async def nginx(folder: Path, upstream: str) -> AsyncIterator[str]:
    """nginx with its defaults, and its url. `make test` installs it where it can.

    It buffers, and asks in HTTP/1.0: of such a reply nothing goes on before a buffer is full, unless it is told better.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    assert program is not None, "there is no nginx: install nginx-light"
    port = free_port()
    config = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # else nginx takes another, who may not write to the folder
    config.write_text(_NGINX.format(folder=folder, port=port, upstream=upstream, user=user))
    child = await asyncio.create_subprocess_exec(program, "-c", str(config), "-e", "stderr")
    try:
        async with asyncio.timeout(START_S):
            while True:
                assert child.returncode is None, f"nginx ended with {child.returncode}"
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    await writer.wait_closed()
                    break
        yield f"http://127.0.0.1:{port}"
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
