"""A look over the network for gather.py: whether Redis can be used, in whatever form `redis.url` names it."""

from __future__ import annotations

import asyncio
import os
import threading

import redis
from redis import exceptions as redis_errors

from gateway.config.load import LoadedConfig
from gateway.config.redis_client import client_for
from gateway.config.redis_master import MasterUnknown, ServiceUnknown
from gateway.config.redis_url import CLUSTER, SENTINEL, SERVER, WAY_OUT, RedisUrl, read_redis_url
from gateway.config.store import store_url
from gateway.domain.store_keys import TAG
from workers.facts import Trouble
from workers.redis_binary import RedisFailed, find_binary

REDIS_S = 2.0


def look_at_redis(loaded: LoadedConfig) -> Trouble | None:
    """None when it can be used: for "embedded" a binary is there, else the server answers and takes scripts."""
    if loaded.config.redis.is_embedded:
        try:
            find_binary()
        except RedisFailed as exc:
            fact, _, way_out = exc.message.partition("; ")
            return Trouble(fact, way_out)
        return None
    answer: list[Trouble | None] = []
    # a thread, since looking up a name knows no deadline; it ends by itself
    thread = threading.Thread(target=lambda: answer.append(_ask(store_url(loaded))), daemon=True)
    thread.start()
    thread.join(REDIS_S * 2)
    return answer[0] if answer else _unreachable(store_url(loaded), "it did not answer in time")


def _ask(url: str) -> Trouble | None:
    read = read_redis_url(url)
    place = read.place
    right = f"{read.scheme}://USER:PASSWORD@{'/PATH' if read.scheme == 'unix' else 'HOST'}"
    try:
        if read.form == SERVER:
            _try_server(url)
        else:
            asyncio.run(_try_master(url))
    except MasterUnknown as exc:
        return _no_master(read, exc)
    except (redis_errors.AuthenticationError, redis_errors.AuthorizationError):
        return Trouble(f"{place} refuses the user or password", f"correct them in the URL: {right}")
    except redis_errors.NoPermissionError:
        return Trouble(
            f"{place} does not let this user run scripts",
            f"allow @scripting and @read @write to it, on the keys {TAG}:* (ACL)",
        )
    except (redis_errors.ConnectionError, redis_errors.TimeoutError) as exc:
        return _unreachable(url, _reason(exc))
    except redis_errors.MovedError:
        return Trouble(f"{place} is a node of a Redis Cluster", WAY_OUT[CLUSTER])
    except redis_errors.ResponseError as exc:
        if str(exc).startswith(("NOAUTH", "WRONGPASS", "ERR AUTH", "ERR invalid password")):
            return Trouble(f"{place} asks for a password", f"add it to the URL: {right}")
        return Trouble(
            f"{place} answers with an error: {_plain(exc, read)}",
            "correct the database number or the server's settings",
        )
    except (redis_errors.RedisError, ValueError):  # a ValueError of the URL would show all of it
        return Trouble("the URL cannot be used", "write it as redis://HOST:6379/0, rediss://… or unix:///PATH")
    return None


def _try_server(url: str) -> None:
    client = redis.Redis.from_url(url, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S, retry=None)
    try:
        client.ping()
        client.script_load("return 1")
        client.exists(f"{TAG}:gateways")
    finally:
        client.close()


async def _try_master(url: str) -> None:
    client = client_for(url, REDIS_S)
    try:
        await client.ping()
        await client.script_load("return 1")
        await client.exists(f"{TAG}:gateways")
    finally:
        await client.aclose()


def _no_master(read: RedisUrl, exc: MasterUnknown) -> Trouble:
    """One of those asked may have said what is wrong; else none could be asked."""
    texts = [str(reason) for reason in exc.reasons.values()]
    is_sentinel = read.form == SENTINEL
    if any(isinstance(reason, ServiceUnknown) for reason in exc.reasons.values()):
        way_out = "write the name that stands in `sentinel monitor NAME …`: redis+sentinel://HOST:26379/NAME"
        return Trouble(f'the sentinels of {read.place} know no service "{read.service}"', way_out)
    if any(isinstance(reason, redis_errors.AuthenticationError) for reason in exc.reasons.values()):
        own = "add ?sentinel_password=… to the URL; before the @ stands the data servers' password"
        return Trouble(
            f"{read.place} refuses the user or password",
            own if is_sentinel else f"correct them in the URL: {read.scheme}://USER:PASSWORD@HOST",
        )
    if any("cluster support disabled" in text for text in texts):
        return Trouble(f"{read.place} is no Redis Cluster", WAY_OUT[SERVER])
    if any("unknown command" in text.lower() for text in texts):
        return Trouble(f"{read.place} is no sentinel", f"{WAY_OUT[SENTINEL]}, or redis://HOST:6379 for one server")
    return _unreachable_place(read.place, ", ".join(sorted({_why(reason, read) for reason in exc.reasons.values()})))


def _why(reason: Exception, read: RedisUrl) -> str:
    return _plain(reason, read) if isinstance(reason, redis_errors.ResponseError) else _reason(reason)


def _plain(exc: Exception, read: RedisUrl) -> str:
    """What the server said, without what we had sent: some echo the arguments of a command that they do not know."""
    said = str(exc).partition(", with args")[0]
    for secret in read.secrets():
        said = said.replace(secret, "***")
    return said


def _reason(exc: Exception) -> str:
    cause = exc.__cause__ or exc.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return (
            os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror
        )  # asyncio words it at length
    return "it did not answer in time" if isinstance(exc, redis_errors.TimeoutError) else "the connection ended"


def _unreachable(url: str, reason: str) -> Trouble:
    return _unreachable_place(read_redis_url(url).place, reason)


def _unreachable_place(place: str, reason: str) -> Trouble:
    return Trouble(
        f"{place} cannot be reached ({reason})",
        'start it, correct the URL, or use "embedded" for a Redis of ours',
    )
