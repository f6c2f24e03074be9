"""What wrk prints is read, and anything but clean answers is a failure."""

from __future__ import annotations

import pytest

from bench.children import RunFailed
from bench.load_plain import lua, read
from bench.request import Target

OUTPUT = """\
Running 5s test @ http://127.0.0.1:1/v1/chat/completions
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     2.03ms  512.00us   9.01ms   90.00%
    Req/Sec    15.85k     1.02k   16.90k    72.00%
{more}  78912 requests in 5.00s, 35.10MB read
{errors}Requests/sec:  15770.34
Transfer/sec:      7.01MB
"""


def output(more: str = "", errors: str = "") -> str:
    return OUTPUT.format(more=more, errors=errors)


def test_requests_and_rate_are_read() -> None:
    assert read(output()) == (78912, 15770.34)


def test_an_answer_that_is_not_2xx_fails_the_run() -> None:
    with pytest.raises(RunFailed, match="7 of 78912 answers were not 2xx"):
        read(output(errors="  Non-2xx or 3xx responses: 7\n"))


def test_a_broken_connection_fails_the_run() -> None:
    with pytest.raises(RunFailed, match="connect 0, read 3, write 0, timeout 0"):
        read(output(errors="  Socket errors: connect 0, read 3, write 0, timeout 0\n"))


@pytest.mark.parametrize("text", ["", "unable to connect to 127.0.0.1:1", output().replace("78912", "0")])
def test_no_request_at_all_fails_the_run(text: str) -> None:
    with pytest.raises(RunFailed, match="finished no request"):
        read(text)


def test_the_script_sends_the_key_and_the_body() -> None:
    script = lua(Target(1, "chat", "sk-k"))
    assert 'wrk.headers["Authorization"] = "Bearer sk-k"' in script
    assert 'wrk.body = [==[{"model": "chat"' in script
