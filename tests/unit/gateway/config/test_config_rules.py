"""What sections say about each other: names exist, aliases are unique, GPUs are not promised twice."""

from __future__ import annotations

import pytest
from fakes.config_lines import HASH, faults, loads, pool, route, sound

from gateway.config.rules import replica_url


def key(**keys):
    return sound(keys={"k": {"sha256": HASH, **keys}})


def two_routes(x, y):
    targets = [{"pool": "a"}]
    return sound(routes={"x": {"targets": targets, **x}, "y": {"targets": targets, **y}})


def two_pools(a, b):
    return sound(pools={"a": {"model": "org/m", **a}, "b": {"model": "org/m", **b}})


ON_0 = {"replicas": [{"gpus": [0]}]}


@pytest.mark.parametrize(
    ("document", "line"),
    [
        (key(**{"class": "vip"}), 'keys.k.class: no class "vip"; classes are: default'),
        (key(user="bob"), 'keys.k.user: no user "bob"; add [users.bob] or use: none'),
        (key(models=["x", "*"]), 'keys.k.models: no route "x"; routes are: chat (or "*" for all)'),
        (route(targets=[{"pool": "z"}]), 'routes.chat.targets[0].pool: no pool "z"; pools are: a, b'),
        (route(fallback=["b", "z"]), 'routes.chat.fallback[1]: no pool "z"; pools are: a, b'),
        (route(fallback=["a"]), 'routes.chat.fallback[0]: pool "a" is listed twice; list it once'),
        (
            route(targets=[{"pool": "a"}, {"pool": "a"}]),
            'routes.chat.targets[1].pool: pool "a" is listed twice; list it once',
        ),
        (
            route(by_class={"vip": {"targets": [{"pool": "a"}]}}),
            'routes.chat.by_class.vip: no class "vip"; classes are: batch',
        ),
        (
            route(by_class={"batch": {"targets": [{"pool": "z"}]}}),
            'routes.chat.by_class.batch.targets[0].pool: no pool "z"; pools are: a, b',
        ),
        (
            two_routes({"aliases": ["m"]}, {"aliases": ["m"]}),
            'routes.y.aliases[0]: "m" is already an alias of route "x"; keep it in one place',
        ),
        (
            two_routes({"aliases": ["m", "m"]}, {}),
            'routes.x.aliases[1]: "m" is already an alias of route "x"; keep it in one place',
        ),
        (
            two_routes({"aliases": ["y"]}, {}),
            'routes.x.aliases[0]: "y" is the name of a route; choose another alias or remove that route',
        ),
        (
            two_routes({"aliases": ["x"]}, {}),
            'routes.x.aliases[0]: "x" is the name of a route; choose another alias or remove that route',
        ),
        (pool(replicas=[{"gpus": [-1]}]), "pools.a.replicas[0].gpus: -1 is no GPU index; count from 0"),
        (
            pool(replicas=[{"gpus": ["0"]}]),
            'pools.a.replicas[0].gpus: "0" is no GPU; give an index, a GPU-UUID or a MIG-UUID',
        ),
        (
            pool(tensor_parallel_size=2, replicas=[{"gpus": [1, 1]}]),
            "pools.a.replicas[0].gpus: a GPU is listed twice in [1, 1]; list each once",
        ),
        (
            pool(tensor_parallel_size=4, replicas=[{"gpus": [0, 1]}]),
            "pools.a.replicas[0].gpus: tensor_parallel_size=4 but gpus=[0, 1]; list 4 GPU(s) or set "
            "tensor_parallel_size=2",
        ),
        (
            two_pools(ON_0, {**ON_0, "gpu_memory_utilization": 0.5}),
            "pools.b.replicas[0].gpus: GPU 0 is used by more than one replica and their shares sum to 1.42: "
            "pools.a.replicas[0].gpus (share 0.92), pools.b.replicas[0].gpus (share 0.5); give them other GPUs, or "
            "lower gpu_memory_utilization so that the sum is at most 1",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_fault_is_told_with_its_key_path_and_nothing_else_is(document, line):
    assert faults(document) == [line]


def test_two_models_one_alias_in_a_cycle_is_refused_naming_both():
    assert faults(two_routes({"aliases": ["y"]}, {"aliases": ["x"]})) == [
        'routes.x.aliases[0]: "x" and "y" are aliases of each other (a cycle); keep one as the route',
        'routes.y.aliases[0]: "y" and "x" are aliases of each other (a cycle); keep one as the route',
    ]


def test_every_fault_is_told_not_only_the_first():
    assert len(faults(sound(keys={"k": {"sha256": HASH, "user": "x", "class": "y", "models": ["z"]}}))) == 3


@pytest.mark.parametrize(
    "document",
    [
        two_pools({**ON_0, "gpu_memory_utilization": 0.6}, {**ON_0, "gpu_memory_utilization": 0.4}),
        two_pools(ON_0, {**ON_0, "vllm_args": {"kv_cache_memory_bytes": 1}}),
        two_pools(ON_0, {**ON_0, "vllm_args": {"kv-cache-memory-bytes": 1}}),
        two_pools(ON_0, {"replicas": [{"gpus": [1]}]}),
        pool(replicas=[{"gpus": []}, {"gpus": []}]),
        pool(tensor_parallel_size=2, replicas=[{"gpus": ["GPU-a", "MIG-b"]}]),
        route(by_class={"batch": {"targets": [{"pool": "b"}], "fallback": ["a"]}}, fallback=["b"]),
    ],
    ids=["shares that fit", "sized in bytes", "sized in bytes, as a flag", "other GPUs", "CPU", "UUIDs", "class order"],
)
def test_what_is_sound_is_let_through(document):
    loads(document)


def test_one_url_in_two_pools_has_one_authority():
    def pools(x, y):
        return sound(pools={"a": {"model": "org/m"}, "x": x, "y": y})

    first = {"urls": ["https://h", "https://g/v1"], "tls_ca": "ca.pem"}
    assert loads(pools(first, {"urls": ["https://g/"], "tls_ca": "ca.pem"}))
    assert loads(pools(first, {"urls": ["https://other"]}))
    assert faults(pools(first, {"urls": ["https://other", "https://g/"]})) == [
        "pools.y.urls[1]: is pools.x.urls[1] too, with another tls_ca; give both pools the same"
    ]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1/", "http://h:1"),
        ("https://llm.example.com/v1", "https://llm.example.com"),
        ("https://llm.example.com/v1/", "https://llm.example.com"),
        ("https://h/openai/v1", "https://h/openai"),
        ("https://h/v10", "https://h/v10"),
        ("https://h/v1/models", "https://h/v1/models"),
        ("unix:/run/s.sock", "unix:/run/s.sock"),
        ("unix:/run/v1", "unix:/run/v1"),
    ],
)
def test_a_v1_at_the_end_of_a_url_is_not_doubled(url, base):
    assert replica_url(url) == base
