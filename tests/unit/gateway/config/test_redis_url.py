"""What a Redis URL says, what redis-py is told of it, and that its secrets are not shown."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import parse_url

from gateway.config.redis_url import read_redis_url

BOTH = "rediss+sentinel://us%40er:p%2Fw@a:1,[::2]:3,c/main/7?protocol=3&sentinel_username=s&sentinel_password=w%20x"


def test_data_servers_and_sentinels_have_their_own_credentials() -> None:
    url = read_redis_url(BOTH)
    assert url.members == (("a", 1), ("::2", 3), ("c", 26379))
    assert url.service == "main"
    data = parse_url(url.data_server())
    assert (data["username"], data["password"], data["db"]) == ("us@er", "p/w", 7)
    sentinel = parse_url(url.sentinel_server())
    assert not {"username", "password", "db", "host"} & set(sentinel)
    assert data["connection_class"] is sentinel["connection_class"]
    assert url.options()["sentinel_password"] == "w x"


def test_a_cluster_has_no_database_and_redis_default_port() -> None:
    url = read_redis_url("redis+cluster://:pw@a,b:7001")
    assert url.members == (("a", 6379), ("b", 7001))
    assert parse_url(url.data_server()) == {"password": "pw"}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://user:secret@host:7000/1", "redis://host:7000"),
        ("rediss://:secret@host", "rediss://host:6379"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
        ("unix://user:secret@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis+sentinel://:secret@a,[::1]:7/s/1?sentinel_password=secret", "redis+sentinel://a:26379,[::1]:7/s"),
        ("rediss+cluster://:secret@a,b:7?ssl_password=secret", "rediss+cluster://a:6379,b:7"),
        ("redis+cluster://a?password=secret", "redis+cluster://a:6379"),
    ],
)
def test_the_place_of_a_redis_url_holds_no_secret(url: str, place: str) -> None:
    read = read_redis_url(url)
    assert read.place == place
    assert "secret" not in read.public + repr(read)
    assert set(read.secrets()) == {"secret"}


@pytest.mark.parametrize(
    "url", ["redis://:secret@host:port", "redis+sentinel://[secret/s", "redis+cluster://:sec/ret@h", "secret://"]
)
def test_a_refusal_does_not_repeat_the_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"; (write|give|remove)") as caught:
        read_redis_url(url)
    assert "sec" not in str(caught.value).replace("is no Redis", "")
