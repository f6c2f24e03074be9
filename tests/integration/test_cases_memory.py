"""What fills memory or starves probes: readers that do not read, a log that nobody takes, very many streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import httpx
import psutil
from fakes.caller import Caller, replies_so_far, request_bytes
from fakes.line import KEY, MESSAGES, running_gateway
from fakes.ports import free_port
from fakes.ruled_line import DONE, LAST, USAGE_EVENT, ruled_line, text, whole
from fakes.scrape import read
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk, plain
from fakes.waits import eventually

from bench.fake_upstream import SERVED_NAME
from bench.load_idle import IdleStreams
from bench.request import Target

ROOT = Path(__file__).parents[2]
CHAT = {"model": "chat", "messages": MESSAGES, "stream": True}
SLOW = "sk-test-slow-readers-0123"
MB = 1 << 20


async def test_slow_readers_do_not_fill_the_memory(tmp_path: Path, redis_url: str) -> None:
    """Half of them never read, half take 1 kB now and then; the upstream writes as fast as it may."""
    sent: list[Peer] = []

    async def flood(peer: Peer, request: Received) -> None:
        sent.append(peer)
        await peer.send(STREAM_HEAD)
        piece = chunk(text("x" * 60_000))
        while True:
            await peer.send(piece)

    async with contextlib.AsyncExitStack() as stack:
        line = await stack.enter_async_context(
            ruled_line(tmp_path, redis_url, limits={SLOW: {"in_flight": 50}}, timeouts={"write_s": 2, "total_s": 10})
        )
        await line.gateway.chat()
        await line.next_record()
        process = psutil.Process(line.gateway.pid)
        before = most = process.memory_info().rss
        line.answer = flood
        callers = [await stack.enter_async_context(Caller(line.gateway.url, receive_buffer=4096)) for _ in range(50)]

        async def sip(caller: Caller) -> None:
            with contextlib.suppress(ConnectionError):
                while await caller.read(1024):  # noqa: ASYNC110  not a wait for something
                    await asyncio.sleep(0.1)

        for caller in callers:
            await caller.ask("/v1/chat/completions", CHAT, key=SLOW)
        sipping = [asyncio.create_task(sip(caller)) for caller in callers[:25]]

        async def all_are_dropped() -> bool:
            nonlocal most
            most = max(most, process.memory_info().rss)
            return len(line.gateway.access_lines()) == 51

        await eventually(all_are_dropped, "slow readers are given up", 30)
        # how much of what is sipped the kernel confirms within `write_s` is its matter; then `total_s` is the end
        assert {record["ending"] for record in await line.next_records(50)} <= {"client_gone", "upstream_error"}

        async def upstream_is_left() -> bool:
            return line.upstream.open_connections == 0

        await eventually(upstream_is_left, "the upstream's connections are closed")
        assert len(sent) == 50
        # an upstream that was never held up would have sent for two seconds; the kernel's buffers hold a few MB
        assert all(peer.sent_bytes < 30 * MB for peer in sent), max(peer.sent_bytes for peer in sent)
        assert most - before < 64 * MB, f"{(most - before) / MB:.0f} MB more"
        for task in sipping:
            task.cancel()
        await asyncio.gather(*sipping, return_exceptions=True)
        await line.at_rest()
        line.answer = whole
        replies = await asyncio.gather(*(line.gateway.chat(SLOW) for _ in range(50)))  # all slots are free
        assert {reply.status_code for reply in replies} == {200}


async def test_a_client_that_pipelines_and_does_not_read_is_not_served_on(tmp_path: Path, redis_url: str) -> None:
    """Each reply is complete as soon as it is written; together they would fill the memory, whatever the limits say."""
    size, count = 4 * MB, 30
    asked: list[Peer] = []

    async def big(peer: Peer, request: Received) -> None:
        asked.append(peer)
        body = b'{"x":"' + b"y" * size + b'"}'
        await peer.send(plain(body, b"200 OK", b"content-type: application/json"))

    async with ruled_line(tmp_path, redis_url) as stage, Caller(stage.gateway.url, receive_buffer=65_536) as caller:
        stage.answer = big
        process = psutil.Process(stage.gateway.pid)
        before = most = process.memory_info().rss
        spent = 0.0

        async def rests() -> bool:
            nonlocal spent
            last, spent = spent, sum(process.cpu_times()[:2])
            await asyncio.sleep(0.25)
            return bool(asked) and spent == last

        for _ in range(count):
            await caller.ask("/v1/chat/completions", CHAT | {"stream": False})
        await eventually(rests, "all is done that is done without a reader", 30)
        assert len(asked) < count / 2
        got = 0
        while got < count * size:  # the heads come on top
            got += len(await caller.read(MB))
            caller.data = b""
            most = max(most, process.memory_info().rss)
        await stage.next_records(count)
        assert len(asked) == count
        assert most - before < 64 * MB, f"{(most - before) / MB:.0f} MB more"


async def test_descriptors_that_run_out_are_not_the_replicas_fault(tmp_path: Path, redis_url: str) -> None:
    """The gateway cannot connect, for want of a descriptor of its own: it says so, and goes on with the replica."""
    released = asyncio.Event()

    async def waits(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD + chunk(text("Hi.")))
        await released.wait()
        await peer.send(chunk(LAST + USAGE_EVENT + DONE) + STREAM_END)

    async with (
        ruled_line(tmp_path, redis_url) as line,
        Caller(line.gateway.url) as first,
        Caller(line.gateway.url) as second,
    ):
        line.answer = waits
        for caller in (first, second):  # both are connected
            await caller.send(request_bytes("/v1/chat/completions", b"", method="GET"))
            await caller.read_until(b"HTTP/1.1 405 ")
            caller.data = b""
        await line.next_records(2)
        await first.ask("/v1/chat/completions", CHAT)
        await first.read_until(b"Hi.")
        pid = line.gateway.pid
        held = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        free = min(set(range(max(held) + 2)) - held)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for _ in range(2):
            await second.ask("/v1/chat/completions", CHAT)
            await second.read_until(b"gateway_full")
            (reply,) = replies_so_far(second.data)
            assert reply.status == 503 and reply.headers[b"retry-after"] == b"1"
            record = await line.next_record()
            assert (record["ending"], record["error_code"]) == ("refused", "gateway_full")
            second.data = b""
        released.set()
        await first.read_until(b"[DONE]")
        await line.next_record()
        await second.ask("/v1/chat/completions", CHAT)  # on the connection that came free
        await second.read_until(b"[DONE]")
        assert (await line.next_record())["status"] == 200
        log = line.gateway.log.read_text()
        assert "is left out" not in log and log.count("no free file descriptor") == 1


async def test_a_log_that_nobody_takes_costs_neither_memory_nor_requests(tmp_path: Path, redis_url: str) -> None:
    """The pipe behind stdout is full: 10,000 records wait, those after them are counted and dropped."""
    batch, batches = 32, 400
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as pipe:
        try:
            async with running_gateway(
                tmp_path, redis_url, stdout=writing, pools={"tiny": {"urls": ["http://127.0.0.1:9"]}}
            ) as gateway:
                os.close(writing)
                writing = -1
                process = psutil.Process(gateway.pid)
                before = process.memory_info().rss
                asked = request_bytes("/v1/chat/completions", b"", method="GET") * batch
                async with Caller(gateway.url) as caller:
                    for _ in range(batches):
                        caller.data = b""
                        await caller.send(asked)
                        await caller.read_until(b"HTTP/1.1 405 ", batch)
                        while not replies_so_far(caller.data)[-1].is_whole:
                            await caller.read()

                async def dropped() -> float:
                    text = (await gateway.client.get(gateway.url + "/metrics")).text
                    return read(text).sum("access_records_dropped_total")

                lost = int(await dropped())
                assert 0 < lost < batch * batches - 10_000 + 1
                assert process.memory_info().rss - before < 32 * MB
                assert (await gateway.chat(model="none")).status_code == 404  # serving goes on
                assert await dropped() == lost + 1

                # the log is read again: what waited comes, and new records with it
                os.set_blocking(reading, False)
                taken = b""

                async def all_come() -> bool:
                    nonlocal taken
                    with contextlib.suppress(BlockingIOError):
                        while more := pipe.read(65_536):
                            taken += more
                    return taken.count(b"\n") + lost == batch * batches

                await eventually(all_come, "the records that waited are written")
                assert (await gateway.chat(model="none")).status_code == 404

                async def the_next_comes() -> bool:
                    nonlocal taken
                    with contextlib.suppress(BlockingIOError):
                        taken += pipe.read(65_536) or b""
                    return taken.count(b"\n") + lost == batch * batches + 1

                await eventually(the_next_comes, "the next record is written")
                assert all(json.loads(line)["log"] == "access" for line in taken.splitlines())
        finally:
            if writing >= 0:
                os.close(writing)


async def test_two_thousand_streams_leave_the_probes_answered(tmp_path: Path, redis_url: str) -> None:
    """Each stream gets an event a second, for ten seconds; a probe that waits for 5 s would restart the gateway."""
    streams_wanted, during_s = 2000, 10.0
    port = free_port()
    command = [sys.executable, "-m", "bench.fake_upstream", str(port), "--tick-ms", "50", "--slices", "20"]
    upstream = await asyncio.create_subprocess_exec(*command, "--tokens", "0", cwd=ROOT)
    answers: list[int] = []

    async def probe(client: httpx.AsyncClient, url: str) -> None:
        for path in ("/health", "/ready"):
            answers.append((await client.get(url + path)).status_code)

    try:
        pools = {"bench": {"urls": [f"http://127.0.0.1:{port}"], "served_name": SERVED_NAME, "max_model_len": 4096}}
        async with (
            running_gateway(tmp_path, redis_url, pools=pools) as gateway,
            httpx.AsyncClient(timeout=5, trust_env=False) as client,
        ):

            async def serves() -> bool:
                return (await gateway.chat()).status_code == 200

            await eventually(serves, "the upstream is there")
            began_s = psutil.Process(gateway.pid).create_time()
            target = Target(int(gateway.url.rpartition(":")[2]), "chat", KEY)
            streams = IdleStreams(target)
            try:
                opening = asyncio.create_task(streams.open_up_to(streams_wanted))
                while not opening.done():
                    await probe(client, gateway.url)
                    await asyncio.sleep(0.5)
                await opening
                streams.require_sound(streams_wanted)
                ends = time.monotonic() + during_s
                while time.monotonic() < ends:
                    await probe(client, gateway.url)
                    await asyncio.sleep(0.5)
                scrape = read((await client.get(gateway.url + "/metrics")).text)
                assert scrape.sum("open_exchanges") == streams_wanted
                await streams.finish(port)
                streams.require_sound(streams_wanted)
                assert streams.finished == streams_wanted
            finally:
                streams.close()
            assert len(answers) >= 20 and set(answers) == {200}
            assert psutil.Process(gateway.pid).create_time() == began_s
            assert "Traceback" not in gateway.log.read_text()
    finally:
        upstream.terminate()
        await upstream.wait()
