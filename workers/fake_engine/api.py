"""What the fake answers to each path; `process.py` hands every request to `Api.handle`."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from workers.fake_engine.answers import ENGINE_DEAD, compact
from workers.fake_engine.checks import Job, chat_tokens, check_model, generating_nothing, job_of
from workers.fake_engine.engine import Engine, count_tokens, token_ids, words
from workers.fake_engine.kinds import Kind
from workers.fake_engine.messages import counted_message
from workers.fake_engine.metrics import CONTENT_TYPE, exposition
from workers.fake_engine.options import VERSION, Options
from workers.fake_engine.paths import CHAT, TEXT, Path, paths_of
from workers.fake_engine.run import EngineDied, Run
from workers.fake_engine.schema import Body, Refusal, decode, missing, refusal, schema_error
from workers.fake_engine.wire import Headers, Reply, Request

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_JSON = ("content-type", "application/json")
_VARY = ("vary", "Origin")

Handler = Callable[[Request, Reply], Awaitable[None]]


class Api:
    """Routes, keys and the record of requests. `on_engine_death` ends the process as vLLM's watchdog does."""

    def __init__(self, options: Options, engine: Engine, on_engine_death: Callable[[], None]) -> None:
        self._options = options
        self._engine = engine
        self._on_engine_death = on_engine_death
        self._requests: deque[Request] = deque(maxlen=100)
        self._calls: Counter[str] = Counter()
        self._children: list[int] = []
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/ping": ("GET, POST", self._health),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/fake/requests": ("GET", self._seen),
            "/fake/state": ("GET", self._state),
        }
        if not options.pooling:
            self._routes["/v1/messages/count_tokens"] = ("POST", self._count_message)
            self._routes["/invocations"] = ("POST", self._invocations)
        self._routes |= {name: ("POST", self._handler(path)) for name, path in paths_of(options).items()}

    def _handler(self, path: Path) -> Handler:
        async def answer(request: Request, reply: Reply) -> None:
            body = path.read(request.header("content-type"), request.body)
            await self._run(request, reply, path.job_for(body, self._options), path.kind)

        return answer

    def children(self, pids: list[int]) -> None:
        """Told once by `process.py`, for /fake/state."""
        self._children = pids

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answers one request; cancelled when the client leaves."""
        route = self._routes.get(request.path)
        if route is not None:
            self._calls[f"{request.method} {request.path}"] += 1
        if request.method == "POST":
            self._requests.append(request)
        if not self._may(request):
            return await reply.whole(401, [_JSON], b'{"error":"Unauthorized"}')
        headers = self._headers(request)
        if route is None:
            return await reply.whole(404, [_JSON, *headers], b'{"detail":"Not Found"}')
        methods, answer = route
        if request.method not in methods.split(", "):
            return await reply.whole(405, [("allow", methods), _JSON, *headers], b'{"detail":"Method Not Allowed"}')
        try:
            return await answer(request, reply)
        except Refusal as refused:
            return await reply.whole(refused.status, [_JSON, *headers], refused.body)

    def _may(self, request: Request) -> bool:
        if not self._options.api_keys or request.method == "OPTIONS" or not request.path.startswith(_GUARDED):
            return True
        scheme, _, key = (request.header("authorization") or "").partition(" ")
        given = key.encode("latin-1")
        return scheme.lower() == "bearer" and any(
            secrets.compare_digest(given, own.encode()) for own in self._options.api_keys
        )

    def _headers(self, request: Request) -> Headers:
        if self._options.request_id_headers:
            return [_VARY, ("x-request-id", request.header("x-request-id") or secrets.token_hex(16))]
        return [_VARY]

    async def _json(self, request: Request, reply: Reply, value: object) -> None:
        await reply.whole(200, [_JSON, *self._headers(request)], compact(value))

    async def _health(self, request: Request, reply: Reply) -> None:
        await reply.whole(503 if self._engine.dead else 200, self._headers(request), b"")

    async def _version(self, request: Request, reply: Reply) -> None:
        await self._json(request, reply, {"version": VERSION})

    async def _load(self, request: Request, reply: Reply) -> None:
        await self._json(request, reply, {"server_load": 0})

    async def _metrics(self, request: Request, reply: Reply) -> None:
        headers = [("content-type", CONTENT_TYPE), *self._headers(request)]
        await reply.whole(200, headers, exposition(self._engine, self._options))

    async def _models(self, request: Request, reply: Reply) -> None:
        await self._json(request, reply, {"object": "list", "data": [self._card(name) for name in self._options.names]})

    def _card(self, name: str) -> dict[str, Any]:
        now = int(time.time())
        permission = {
            "id": f"modelperm-{secrets.token_hex(8)}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": self._options.model,
            "parent": None,
            "max_model_len": self._options.max_model_len,
            "permission": [permission],
        }

    async def _tokenize(self, request: Request, reply: Reply) -> None:
        body = decode(request.header("content-type"), request.body)
        check_model(body, self._options)
        if "messages" in body:
            text, count = chat_tokens(body)
            ids = [*range(count - count_tokens(text)), *token_ids(text)]
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise missing(body, "prompt")
            ids = token_ids(prompt)
        answer = {"count": len(ids), "max_model_len": self._options.max_model_len, "tokens": ids, "token_strs": None}
        await self._told(request, reply, body, answer)

    async def _seen(self, request: Request, reply: Reply) -> None:
        seen = [
            {"method": r.method, "path": r.path, "headers": r.headers, "body": r.body.decode(errors="backslashreplace")}
            for r in self._requests
        ]
        await self._json(request, reply, seen)

    async def _state(self, request: Request, reply: Reply) -> None:
        engine = self._engine
        state = {
            "pid": os.getpid(),
            "children": self._children,
            "running": engine.running,
            "most_running": engine.most_running,
            "waiting": engine.waiting,
            "aborted": engine.aborted,
            "calls": self._calls,
        }
        await self._json(request, reply, state)

    async def _detokenize(self, request: Request, reply: Reply) -> None:
        body = decode(request.header("content-type"), request.body)
        check_model(body, self._options)
        tokens = body.get("tokens")
        if "tokens" in body and not isinstance(tokens, list):
            raise schema_error("body.tokens", "list_type", "Input should be a valid list", tokens)
        if not isinstance(tokens, list):
            raise missing(body, "tokens")
        await self._told(request, reply, body, {"prompt": "".join(words(str(tokens), 0, len(tokens)))})

    async def _count_message(self, request: Request, reply: Reply) -> None:
        body = decode(request.header("content-type"), request.body)
        await self._told(request, reply, body, counted_message(body, self._options))

    async def _told(self, request: Request, reply: Reply, body: Body, answer: dict[str, Any]) -> None:
        """An answer that needs no engine core, unless a fault is asked for."""
        if "x_fake" in body:
            job = generating_nothing(body, self._options, 0)
            await self._run(request, reply, job, Kind("", lambda *_: compact(answer)))
        else:
            await self._json(request, reply, answer)

    async def _invocations(self, request: Request, reply: Reply) -> None:
        body = decode(request.header("content-type"), request.body)
        chat = "messages" in body
        await self._run(request, reply, job_of(body, self._options, chat), CHAT if chat else TEXT)

    async def _run(self, request: Request, reply: Reply, job: Job, kind: Kind) -> None:
        self._engine.accepted += 1
        if self._engine.dead:
            raise Refusal(500, ENGINE_DEAD)
        if self._engine.refuses_new:
            raise refusal(500, "cannot schedule new futures after shutdown", "InternalServerError")
        task = asyncio.current_task()
        assert task is not None
        self._engine.jobs.add(task)
        try:
            name = request.header("x-request-id") or ""
            await Run(self._options, self._engine, reply, self._headers(request), job, kind, name).run()
        except EngineDied:
            self._on_engine_death()
        finally:
            self._engine.jobs.discard(task)
