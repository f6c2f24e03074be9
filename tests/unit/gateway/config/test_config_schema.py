"""What one section says about itself: kinds, ranges, keys that exclude each other."""

from __future__ import annotations

import datetime

import pytest
from fakes.config_lines import HASH, faults, loads, pool, route, sound
from pydantic import ValidationError


@pytest.mark.parametrize(
    ("document", "line"),
    [
        # kinds
        (sound(gateway=5), "gateway: must be a table: { … }"),
        (sound(pools=[1]), "pools: must be a table: { … }"),
        (sound(pools={"a": 5}), "pools.a: must be a table: { … }"),
        (sound(gateway={"port": "x"}), "gateway.port: must be a whole number"),
        (sound(gateway={"port": 80.5}), "gateway.port: must be a whole number"),
        (sound(gateway={"host": 5}), "gateway.host: must be text in quotes"),
        (sound(gateway={"drain_s": "long"}), "gateway.drain_s: must be a number"),
        (sound(redis={"on_outage": "x"}), "redis.on_outage: must be 'share', 'open' or 'closed'"),
        (pool(urls="http://x"), "pools.a.urls: must be a list: [ … ]"),
        (sound(workers={"env": {"X": 5}}), "workers.env.X: must be text in quotes"),
        (
            pool(replicas=[{"gpus": [1.5]}]),
            "pools.a.replicas[0].gpus[0]: must be a whole number, or must be text in quotes",
        ),
        # ranges
        (sound(gateway={"port": 0}), "gateway.port: must be at least 1"),
        (sound(gateway={"port": 65536}), "gateway.port: must be at most 65535"),
        (sound(gateway={"processes": -1}), "gateway.processes: must be at least 0"),
        (sound(gateway={"max_body_bytes": 10}), "gateway.max_body_bytes: must be at least 1024"),
        (sound(gateway={"drain_s": 0}), "gateway.drain_s: must be more than 0"),
        (sound(gateway={"drain_s": float("inf")}), "gateway.drain_s: must be at most 604800"),
        (sound(gateway={"drain_s": float("nan")}), "gateway.drain_s: must be at most 604800"),
        (sound(gateway={"timeouts": {"gap_s": -1}}), "gateway.timeouts.gap_s: must be more than 0"),
        (sound(classes={"c": {"priority": 1001}}), "classes.c.priority: must be at most 1000"),
        (sound(users={"u": {"limits": {"in_flight": 0}}}), "users.u.limits.in_flight: must be at least 1"),
        (pool(tensor_parallel_size=0), "pools.a.tensor_parallel_size: must be at least 1"),
        (pool(gpu_memory_utilization=1.1), "pools.a.gpu_memory_utilization: must be at most 1"),
        (pool(max_model_len=0), "pools.a.max_model_len: must be at least 1"),
        (route(targets=[{"pool": "a", "weight": 0}]), "routes.chat.targets[0].weight: must be more than 0"),
        (route(max_output_tokens=0), "routes.chat.max_output_tokens: must be at least 1"),
        # emptiness
        (sound(pools={}), "pools: is empty; define at least one [pools.NAME]"),
        (sound(routes={}), "routes: is empty; define at least one [routes.NAME]"),
        (sound(classes={}), "classes: is empty; define at least one [classes.NAME]"),
        (route(targets=[]), "routes.chat.targets: is empty; give at least one"),
        (route(aliases=[""]), "routes.chat.aliases[0]: is empty; give a name"),
        (pool(urls=[]), "pools.a: urls is empty; list at least one"),
        (pool(replicas=[]), "pools.a: replicas is empty; list at least one, e.g. replicas = [{ gpus = [0] }]"),
        # unknown and missing keys, names
        (sound(gatway={}), "gatway: unknown key; remove it or check its spelling (docs/config.md lists all keys)"),
        (
            pool(replicas=[{"gpu": 0}]),
            "pools.a.replicas[0].gpu: unknown key; remove it or check its spelling (docs/config.md lists all keys)",
        ),
        (route(targets=[{"weight": 1}]), "routes.chat.targets[0].pool: is missing; add it"),
        (
            sound(users={"a b": {}}),
            "users.a b (its name): does not have the right form; it must match ^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$",
        ),
        # keys that exclude each other
        (
            sound(keys={"k": {}}),
            "keys.k: needs exactly one of key_env and sha256 (a key in clear is refused); give the name of an "
            "environment variable, or 64 hex digits",
        ),
        (
            sound(keys={"k": {"key_env": "K", "sha256": HASH}}),
            "keys.k: needs exactly one of key_env and sha256 (a key in clear is refused); give the name of an "
            "environment variable, or 64 hex digits",
        ),
        (
            sound(pools={"a": {}}),
            "pools.a: needs exactly one of model and urls; give model for workers of this host, or urls of servers "
            "that others run",
        ),
        (
            pool(model="m", urls=["http://x"]),
            "pools.a: needs exactly one of model and urls; give model for workers of this host, or urls of servers "
            "that others run",
        ),
        (
            pool(urls=["http://x"], dtype="auto", env={}),
            "pools.a: dtype, env is only for pools with model; remove it, or give model, not urls",
        ),
        # addresses
        *(
            (
                pool(urls=["http://fine", url]),
                "pools.a.urls: is no address of a server; write http://host:port, https://host or unix:/path/of.sock, "
                "a path may follow",
            )
            for url in ("http://", "ftp://h", "h:8000", "", "https:///v1", "http://h:0", "unix:relative", "//h")
        ),
        *(
            (
                pool(urls=[url]),
                "pools.a.urls: cannot be read; write https://host:port, brackets around IPv6",
            )
            for url in ("http://h:99999", "http://h:x", "http://[::1")
        ),
        *(
            (
                pool(urls=[url]),
                "pools.a.urls: has a user or a password in it; remove them, and give the key with key_env",
            )
            for url in ("https://u:p@h", "http://u@h", "http://@h")
        ),
        *(
            (
                pool(urls=[url]),
                "pools.a.urls: has a query string or a fragment, which no request would carry; remove it",
            )
            for url in ("https://h/v1?key=x", "https://h#x", "https://h?")
        ),
        *(
            (pool(urls=[url]), "pools.a.urls: has characters that no url has; write them percent-encoded")
            for url in ("http://h/ü", "http://h/a b", "http://h /x", "http://h\x7f")
        ),
        (pool(urls=["unix:/"]), "pools.a.urls: names no socket; write unix:/path/of.sock"),
        # servers of others
        (pool(urls=["http://x"], engine="tgi"), "pools.a.engine: must be 'vllm' or 'openai'"),
        (
            pool(urls=["http://x"], key_env="sk-x y"),
            "pools.a.key_env: does not have the right form; it must match ^[A-Za-z_][A-Za-z0-9_]*$",
        ),
        (
            pool(urls=["http://x"], engine="openai", scheduling_policy="priority"),
            'pools.a: scheduling_policy is only for engine = "vllm"; remove it',
        ),
        (
            pool(urls=["http://x"], tls_ca="ca.pem"),
            "pools.a: tls_ca is only for urls that begin with https://; remove it, or write the urls so",
        ),
        (
            pool(model="m", engine="vllm", key_env="K", tls_ca="ca.pem"),
            "pools.a: engine, key_env, tls_ca is only for pools with urls; remove it, or give urls, not model",
        ),
        (
            sound(redis={"url": "http://x"}),
            'redis.url: is no Redis; give "embedded", redis://…, rediss://…, unix://…, redis+sentinel://… or redis+cluster://…',
        ),
        # options of vLLM
        (pool(vllm_args={"--port": 1}), 'pools.a.vllm_args: "--port" is set by Poolgate itself; remove it'),
        (pool(vllm_args={"api-key": "x"}), 'pools.a.vllm_args: "api-key" is set by Poolgate itself; remove it'),
        (
            pool(vllm_args={"max-model-len": 1}),
            'pools.a.vllm_args: "max-model-len" has a key of its own; write it as max_model_len = … in the pool',
        ),
        (
            route(defaults={"max_tokens": 5}),
            'routes.chat.defaults: "max_tokens" cannot have a default; use max_output_tokens for the output cap',
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_fault_is_told_with_its_key_path_and_nothing_else_is(document, line):
    assert faults(document) == [line]


def test_an_option_of_a_kind_that_no_flag_has_is_one_fault():
    (line,) = faults(pool(vllm_args={"x": datetime.date(2026, 1, 1)}))
    assert line.startswith("pools.a.vllm_args.x: must be text in quotes, or must be ")


def test_sections_cannot_be_changed_once_loaded():
    loaded = loads(sound())
    with pytest.raises(ValidationError, match="frozen"):
        loaded.config.gateway.port = 1  # type: ignore[misc]


def test_a_pool_with_urls_says_what_its_servers_run_with():
    document = pool(urls=["http://x:1"], served_name="m", max_model_len=9, scheduling_policy="priority")
    assert loads(document).config.pools["a"].max_model_len == 9


def test_a_file_without_classes_has_one():
    assert set(loads(sound()).config.classes) == {"default"}


@pytest.mark.parametrize(
    "url",
    ["http://h", "http://h:1/", "https://h", "https://[::1]:8443/a/b/v1/", "unix:/run/s.sock", "unix:///run/s.sock"],
)
def test_an_address_of_a_server_is_taken(url):
    assert loads(pool(urls=[url])).config.pools["a"].urls == [url]
