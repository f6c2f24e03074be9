"""/v1/messages and its count_tokens as vLLM 0.32.0 answers them, plain and as a stream of named events."""

from __future__ import annotations

import json
from typing import Any

from workers.fake_engine.answers import compact, named
from workers.fake_engine.checks import Job, chat_tokens, check_length, check_model, fault_in, generation
from workers.fake_engine.options import Options
from workers.fake_engine.schema import Body, Refusal, missing, refusal, schema_error


def message_job(body: Body, options: Options) -> Job:
    """Raises Refusal in Anthropic's shape, but for schema errors, which have OpenAI's here too."""
    fault = fault_in(body)
    for name in ("model", "messages", "max_tokens"):
        if body.get(name) is None:
            raise missing(body, name)
    if (asked := body["max_tokens"]) < 1:
        message = "Value error, max_tokens must be positive"
        raise schema_error("body.max_tokens", "value_error", message, asked)
    try:
        prompt = block_tokens(body)
        check_model(body, options)
        return generation(body, options, [prompt], asked, fault, name="max_completion_tokens")
    except Refusal as refused:
        raise _in_anthropics_shape(refused) from None


def counted_message(body: Body, options: Options) -> dict[str, Any]:
    """The answer of /v1/messages/count_tokens."""
    try:
        _, tokens = block_tokens(body)
        check_model(body, options)
        check_length(tokens, options)
    except Refusal as refused:
        raise _in_anthropics_shape(refused) from None
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def _in_anthropics_shape(refused: Refusal) -> Refusal:
    document: Any = refused.document
    error = document["error"]
    if error["type"] == "Bad Request":
        return refused
    return Refusal(refused.status, {"type": "error", "error": {"type": error["type"], "message": error["message"]}})


def block_tokens(body: Body) -> tuple[str, int]:
    """Text and token count of `system`, `messages` and `tools`."""
    messages: Any = body.get("messages")
    if isinstance(messages, list):
        messages = [
            {**message, "content": _text_of(message.get("content"))} if isinstance(message, dict) else message
            for message in messages
        ]
        if body.get("system"):
            messages.insert(0, {"role": "system", "content": _text_of(body["system"])})
    given = {name: value for name, value in (("messages", messages), ("tools", body.get("tools"))) if value is not None}
    return chat_tokens(given)


def _text_of(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    if any(block.get("type") in ("image", "document") for block in content):
        raise refusal(400, "this is not a multimodal model")
    return "".join(str(block["text"]) if block.get("type") == "text" else json.dumps(block) for block in content)


def _stop_reason(job: Job) -> str | None:
    return {"length": "max_tokens", "stop": "end_turn"}.get(job.finish)


def _message_usage(job: Job, generated: int, options: Options) -> dict[str, int]:
    usage = {"input_tokens": job.prompt_tokens, "output_tokens": generated}
    return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0} if options.prompt_details else usage


def whole_message(job: Job, answer_id: str, options: Options) -> bytes:
    tokens = job.choices[0]
    answer: dict[str, Any] = {"id": answer_id, "type": "message", "role": "assistant",
                              "content": [{"type": "text", "text": "".join(tokens)}], "model": job.model}  # fmt: skip
    if (reason := _stop_reason(job)) is not None:
        answer["stop_reason"] = reason
    if not job.fault.no_usage:
        answer["usage"] = _message_usage(job, len(tokens), options)
    return compact(answer)


class MessageEvents:
    """The only choice's text as one block."""

    def __init__(self, job: Job, answer_id: str, options: Options) -> None:
        self._job = job
        self._options = options
        self._id = answer_id
        self._generated = 0

    def opening(self) -> list[bytes]:
        job = self._job
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": job.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": job.prompt_tokens, "output_tokens": 0},
        }
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return [
            named("message_start", {"type": "message_start", "message": message}),
            named("content_block_start", block),
        ]

    def token(self, choice: int, piece: str) -> bytes:
        self._generated += 1
        delta = {"type": "text_delta", "text": piece}
        return named("content_block_delta", {"type": "content_block_delta", "delta": delta, "index": 0})

    def last(self, choice: int, piece: str, finish: str) -> bytes:
        return self.token(choice, piece)

    def closing(self) -> list[bytes]:
        delta: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(self._job), "stop_sequence": None},
        }
        if not self._job.fault.no_usage:
            delta["usage"] = _message_usage(self._job, self._generated, self._options)
        stop = named("content_block_stop", {"type": "content_block_stop", "index": 0})
        return [stop, named("message_delta", delta)]

    def done(self) -> bytes:
        return named("message_stop", {"type": "message_stop"})

    def failed(self) -> bytes | None:
        return named("error", {"type": "error", "error": {"type": "internal_error", "message": "EngineCore died"}})
