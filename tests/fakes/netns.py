"""A host of its own for a caller: a network namespace whose cable to the gateway can be cut. Needs root and iproute2.

async with caller_host() as host:
    async with host.caller(port, path, body, key, until=b"first bytes"):
        await host.cut_off()  # no FIN, no RST: nothing arrives any more
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fakes.caller import request_bytes

WITHIN_S = 20.0
_CALL = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(sys.stdin.buffer.read())
got = b""
while data := sock.recv(65536):
    got += data
    if sys.argv[3].encode() in got:
        print("there", flush=True)
        got = b""
"""


class CallerHost:
    def __init__(self, program: str, name: str, subnet: str) -> None:
        self._program = program
        self.name = name
        self.gateway_address, self.own_address = f"{subnet}.1", f"{subnet}.2"
        self.link = name[-13:]  # of the gateway's side; names of links have 15 letters at most

    async def set_up(self) -> None:
        await self.ip("netns", "add", self.name)
        try:
            await self.ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        except AssertionError:
            await self.ip("netns", "del", self.name)
            raise
        await self.ip("addr", "add", f"{self.gateway_address}/30", "dev", self.link)
        await self.ip("link", "set", self.link, "up")
        await self.ip("-n", self.name, "addr", "add", f"{self.own_address}/30", "dev", "eth0")
        await self.ip("-n", self.name, "link", "set", "eth0", "up")

    async def tear_down(self) -> None:
        """The link by name: the kernel keeps a namespace, and what is in it, as long as a socket there waits to die."""
        await self.ip("link", "del", self.link)
        await self.ip("netns", "del", self.name)

    async def cut_off(self) -> None:
        await self.ip("-n", self.name, "link", "set", "eth0", "down")

    @asynccontextmanager
    async def caller(self, port: int, path: str, body: Any, key: str, *, until: bytes) -> AsyncIterator[None]:
        """A process on that host that sends the request and reads on for good; entered when `until` has come."""
        command = [self._program, "netns", "exec", self.name, sys.executable, "-c", _CALL]
        child = await asyncio.create_subprocess_exec(
            *command,
            self.gateway_address,
            str(port),
            until.decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(request_bytes(path, body, key=key))
            await child.stdin.drain()
            child.stdin.close()
            assert await asyncio.wait_for(child.stdout.readline(), WITHIN_S) == b"there\n"
            yield
        finally:
            if child.returncode is None:
                child.kill()
            await child.communicate()

    async def ip(self, *arguments: str) -> None:
        child = await asyncio.create_subprocess_exec(self._program, *arguments)
        try:
            assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0, f"ip {' '.join(arguments)}"
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


@asynccontextmanager
async def caller_host() -> AsyncIterator[CallerHost]:
    program = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    assert program is not None, "there is no ip: install iproute2"
    assert os.geteuid() == 0, "a network namespace needs root"
    # 198.18.0.0/15 is set aside for tests of networks (RFC 2544)
    subnet = f"198.18.{random.randrange(256)}"
    host = CallerHost(program, f"pg-{os.getpid()}-{random.randrange(1000)}", subnet)
    await host.set_up()
    try:
        yield host
    finally:
        await host.tear_down()
