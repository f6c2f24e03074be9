"""Values that pydantic, redis-py or the kernel would have taken and that are slips: each is a config error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config.load import parse
from gateway.domain.errors import ConfigError

SOUND: dict[str, Any] = {
    "pools": {"a": {"urls": ["http://127.0.0.1:9"]}},
    "routes": {"chat": {"targets": [{"pool": "a"}]}},
}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"gateway": {"port": True}}, "gateway.port: must be a number, not true or false"),
        ({"gateway": {"drain_s": True}}, "gateway.drain_s: must be a number"),
        ({"users": {"u": {"limits": {"in_flight": True}}}}, "users.u.limits.in_flight: must be a number"),
        ({"gateway": {"host": ""}}, "gateway.host"),
        ({"gateway": {"state_dir": ""}}, "gateway.state_dir"),
        ({"gateway": {"state_dir": "a\0b"}}, "gateway.state_dir"),
        ({"workers": {"env": {"A=B": "x"}}}, "workers.env"),
        ({"workers": {"env": {"": "x"}}}, "workers.env"),
        ({"workers": {"env": {"A": "x\0"}}}, "workers.env"),
        ({"keys": {"k": {"key": "sk-clear"}}}, "keys.k.key: a key does not belong in this file in clear"),
        ({"keys": {"k": {"sha256": "sk-clear"}}}, "keys.k.sha256: a key does not belong in this file in clear"),
        ({"redis": {"url": "redis://h/0?foo=bar"}}, 'redis.url: has an option "foo"'),
        ({"redis": {"url": "redis://h/abc"}}, "redis.url: names no database"),
        ({"redis": {"url": "redis://[::1/0"}}, "redis.url: cannot be read"),
        ({"redis": {"url": "redis://h:port/0"}}, "redis.url: cannot be read"),
        ({"redis": {"url": "redis://a:1,b:2/0"}}, "redis.url: names several servers"),
        ({"redis": {"url": "redis://h/0#x"}}, 'redis.url: holds a "#"'),
        ({"redis": {"url": "redis-sentinel://h/s"}}, "redis.url: is no Redis; give"),
        ({"redis": {"url": "redis+sentinel://h:26379"}}, "redis.url: names no service"),
        ({"redis": {"url": "redis+sentinel://h/s/x"}}, "redis.url: names no service"),
        ({"redis": {"url": "redis+sentinel://h/s?db=1"}}, 'redis.url: has an option "db"'),
        ({"redis": {"url": "redis+sentinel://a:1,b:port/s"}}, "redis.url: cannot be read"),
        ({"redis": {"url": "redis+sentinel://a,/s"}}, "redis.url: names a server without a host"),
        ({"redis": {"url": "redis+cluster://"}}, "redis.url: names a server without a host"),
        ({"redis": {"url": "redis+cluster://h/1"}}, "redis.url: names a database"),
        ({"redis": {"url": "redis+cluster://h?sentinel_password=x"}}, 'redis.url: has an option "sentinel_password"'),
        ({"redis": {"url": "redis+cluster://" + ",".join("h" * 17)}}, "redis.url: names 17 servers"),
    ],
)
def test_slip_is_an_error_at_its_key_path(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SOUND | sections, Path("config.toml"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:pw@h:6380/3",
        "rediss://h/0?ssl_cert_reqs=none",
        "unix:///run/r.sock?db=1",
        "embedded",
        "redis+sentinel://a:26379,b,[::1]:26380/main",
        "rediss+sentinel://u:p@a/main/2?sentinel_username=s&sentinel_password=w&ssl_ca_certs=/ca.pem",
        "redis+cluster://a,b:7001",
        "rediss+cluster://u:p@[::1]:7000,[::2]:7001/0",
    ],
)
def test_ordinary_redis_urls_are_taken(url: str) -> None:
    assert parse(SOUND | {"redis": {"url": url}}, Path("config.toml")).config.redis.url.get_secret_value() == url


def test_a_flag_of_vllm_may_be_true() -> None:
    sections = {"pools": {"a": {"model": "org/m", "vllm_args": {"enforce_eager": True}}}}
    assert parse(SOUND | sections, Path("config.toml")).config.pools["a"].vllm_args == {"enforce_eager": True}
