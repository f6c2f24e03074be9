"""/v1/models, /health, /ready, /metrics and every other path: Litestar's part of the edge, called through Front."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes.client import KEY, Client
from fakes.scrape import read
from fakes.story import ALICE, FixedSource, a_config, replica
from litestar import Litestar, get
from litestar.di import Provide
from litestar.params import FromQuery

from gateway.app import stamp_request_id, unhandled
from gateway.domain.errors import InvalidKey, StoreUnavailable
from gateway.domain.replica import ReplicaRecord, ReplicaState
from gateway.domain.request import Principal
from gateway.edge.inference import inference_handlers
from gateway.edge.models import ModelsController
from gateway.edge.ops import OpsController
from gateway.fleet.registry import Registry
from gateway.routing.table import RouteTable, routes_of
from gateway.runtime import Runtime

NAMES = ["org/model", "model:tag", "a name", "Upper", "50%25 off", "ünïcode"]
CONFIG = a_config(
    pools={"a": {"urls": ["http://a"]}, "b": {"urls": ["http://b"]}},
    routes={
        "chat": {"aliases": NAMES, "targets": [{"pool": "a"}], "fallback": ["b"], "max_output_tokens": 100},
        "small": {"targets": [{"pool": "b"}]},
    },
)


@get("/boom")
async def boom() -> None:
    raise RuntimeError("secret detail")


@get("/typed")
async def typed(number: FromQuery[int]) -> dict[str, int]:
    return {"number": number}


class World:
    """The app's controllers over a runtime made of fakes."""

    def __init__(self, *replicas: ReplicaRecord, principal: Principal | Exception = ALICE) -> None:
        self.routes = RouteTable(routes_of(CONFIG.config))
        self.fleet = Registry([FixedSource(replicas or [replica("a/0@h", max_model_len=4096)])])
        self.principal = principal
        self.dropped = 0
        parts: Any = self
        self.runtime = Runtime(CONFIG, parts, parts, self.fleet, parts, None)
        self.app = Litestar(
            route_handlers=[ModelsController, OpsController, boom, typed],
            dependencies={"runtime": Provide(lambda: self.runtime, sync_to_thread=False)},
            exception_handlers={Exception: unhandled},
            openapi_config=None,
            logging_config=None,
            before_send=[stamp_request_id],
        )

    def known(self, presented: bytes) -> None:
        """Every key has to be asked for."""

    async def authenticate(self, presented: bytes) -> Principal:
        if isinstance(self.principal, Exception):
            raise self.principal
        if presented != b"sk-test":
            raise InvalidKey
        return self.principal

    async def call(self, path: str, method: str = "GET", headers: list[tuple[bytes, bytes]] | None = None) -> Client:
        await self.fleet.refresh()
        client = Client(method=method, path=path, headers=[KEY] if headers is None else headers)
        await client.call(inference_handlers(lambda: self.runtime), app=self.app)
        return client


async def get_json(path: str, world: World | None = None, status: int = 200) -> Any:
    client = await (world or World()).call(path)
    assert client.status == status, client.body
    return json.loads(client.body)


# --- models -------------------------------------------------------------------------------------------------


async def test_routes_and_aliases_are_listed_as_openai_lists_models() -> None:
    listed = await get_json("/v1/models")
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["chat", *NAMES, "small"]
    chat, alias, *_, small = listed["data"]
    assert (chat["object"], chat["owned_by"], chat["parent"]) == ("model", "poolgate", None)
    assert isinstance(chat["created"], int)
    assert (alias["parent"], small["parent"]) == ("chat", None)
    assert (chat["max_model_len"], chat["max_output_tokens"], chat["state"]) == (4096, 100, "ready")
    assert (small["max_model_len"], small["max_output_tokens"], small["state"]) == (None, None, "no replica known")


async def test_the_list_shows_what_this_key_may_use() -> None:
    world = World(principal=replace(ALICE, models=("small",)))
    assert [card["id"] for card in (await get_json("/v1/models", world))["data"]] == ["small"]
    assert (await world.call("/v1/models/chat")).status == 404


@pytest.mark.parametrize(
    "path",
    [
        "chat",
        "org/model",
        "org%2Fmodel",
        "model:tag",
        "model%3Atag",
        "a%20name",
        "Upper",
        "50%2525%20off",
        "%C3%BCn%C3%AFcode",
    ],
)
async def test_every_listed_id_can_be_retrieved_plain_and_percent_encoded(path: str) -> None:
    world = World()
    card = await get_json(f"/v1/models/{path}", world)
    assert card["id"] in ["chat", *NAMES]
    assert card in (await get_json("/v1/models", world))["data"]


@pytest.mark.parametrize("path", ["nothing", "upper", "org", "org/model/x", "chat%20"])
async def test_an_unknown_id_is_a_404_unlike_an_unknown_path(path: str) -> None:
    error = (await World().call(f"/v1/models/{path}")).error()
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await World().call("/v1/nothing")).error()["code"] == "unknown_path"


async def test_a_loading_pool_is_listed_with_its_state() -> None:
    world = World(replica("a/0@h", ReplicaState.STARTING), replica("a/1@h", ReplicaState.FAILED))
    assert (await get_json("/v1/models/chat", world))["state"] == "1 failed, 1 starting"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/chat"])
async def test_models_are_for_callers_with_a_key(path: str) -> None:
    client = await World().call(path, headers=[])
    assert (client.status, client.error()["code"]) == (401, "invalid_api_key")
    assert client.headers[b"www-authenticate"] == b"Bearer"
    away = World(principal=StoreUnavailable("away", retry_after_s=1))
    client = await away.call(path)
    assert (client.status, client.headers[b"retry-after"]) == (503, b"1")


# --- health and readiness -----------------------------------------------------------------------------------


async def test_health_needs_no_key_and_no_replica() -> None:
    client = await World(replica("a/0@h", ReplicaState.FAILED)).call("/health", headers=[])
    assert (client.status, json.loads(client.body)) == (200, {"status": "ok"})


async def test_ready_means_that_some_replica_can_serve() -> None:
    assert (await get_json("/ready"))["status"] == "ready"
    body = await get_json("/ready", World(replica("a/0@h", ReplicaState.WARMING)), 503)
    assert body == {"status": "no replica is ready", "revision": CONFIG.revision}


async def test_readiness_ends_at_once_when_a_stop_was_asked_for() -> None:
    world = World()
    world.runtime.begin_drain()
    assert (await get_json("/ready", world, 503))["status"] == "draining"
    assert (await world.call("/health")).status == 200


# --- every other path ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/invocations",
        "/collective_rpc",
        "/sleep",
        "/pooling",
        "/v1/load_lora_adapter",
        "/v1/chat/completions/render",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_workers_other_paths_do_not_exist_here(path: str, method: str) -> None:
    client = await World().call(path, method)
    assert (client.status, client.error()["code"]) == (404, "unknown_path")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/x", "/v1/chat"]
)
async def test_a_path_below_a_proxied_one_is_not_proxied(path: str) -> None:
    assert (await World().call(path, "POST")).error()["code"] == "unknown_path"


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_a_known_path_with_another_method_says_so(path: str) -> None:
    client = await World().call(path, "POST")
    assert (client.status, client.error()["code"]) == (405, "method_not_allowed")
    assert b"GET" in client.headers[b"allow"]


async def test_a_path_of_ten_kilobytes_does_not_come_back_in_the_error() -> None:
    assert len((await World().call("/" + "x" * 10_000)).body) < 500


async def test_a_defect_is_a_500_that_tells_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    client = await World().call("/boom")
    assert (client.status, client.error()["code"]) == (500, "internal_error")
    assert b"secret" not in client.body and "secret detail" in caplog.text


async def test_a_query_that_cannot_be_read_is_a_400_in_our_envelope() -> None:
    assert (await World().call("/typed?number=x")).error()["code"] == "invalid_request"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/nothing", "/nothing", "/boom", "/health"])
async def test_every_reply_carries_a_request_id(path: str) -> None:
    world = World()
    client = await world.call(path, headers=[KEY, (b"x-request-id", b"mine")])
    assert client.headers[b"x-request-id"] == b"mine"
    client = await world.call(path, headers=[KEY, (b"x-request-id", b"not sane")])
    assert client.headers[b"x-request-id"].startswith(b"req-")


# --- metrics ------------------------------------------------------------------------------------------------


async def test_metrics_are_open_where_no_key_is_set_and_tell_what_the_fleet_does_now() -> None:
    world = World(replica("a/0@h"), replica("a/1@h", ReplicaState.FAILED))
    world.fleet.begin(replica("a/0@h"))
    world.dropped = 3
    server = await world.call("/metrics", headers=[])
    assert server.status == 200
    assert server.headers[b"content-type"] == b"text/plain; version=0.0.4; charset=utf-8"
    seen = read(server.body.decode())
    assert (seen.sum("replicas", pool="a", state="ready"), seen.sum("replicas", pool="a", state="failed")) == (1, 1)
    assert (seen.sum("requests_in_flight", pool="a"), seen.sum("access_records_dropped_total")) == (1, 3)
    assert seen.sum("build_info", revision=CONFIG.revision) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([(b"authorization", b"Bearer scrape-kex")], 401),
        ([(b"authorization", b"Bearer scrape-key-and-more")], 401),
        ([(b"authorization", "Bearer scrape-kéy".encode())], 401),
        ([(b"authorization", b"Basic scrape-key")], 401),
        ([KEY], 401),
        ([(b"authorization", b"Bearer scrape-key")], 200),
    ],
)
async def test_metrics_with_a_key_of_their_own_take_that_one_only(headers: list[Any], status: int) -> None:
    world = World()
    world.runtime.metrics_key = "scrape-key"
    server = await world.call("/metrics", headers=headers)
    assert server.status == status
    assert (b"poolgate_" in server.body) == (status == 200)
