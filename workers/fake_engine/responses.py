"""/v1/responses as vLLM 0.32.0 answers it, plain and as a stream of named events."""

from __future__ import annotations

import json
import secrets
from typing import Any

from workers.fake_engine.answers import compact, named
from workers.fake_engine.checks import Job, asked_tokens, chat_tokens, check_model, check_sampling, fault_in, generation
from workers.fake_engine.options import Options
from workers.fake_engine.schema import Body, missing, refusal


def response_job(body: Body, options: Options) -> Job:
    """Raises Refusal."""
    fault = fault_in(body)
    asked = asked_tokens(body, "max_output_tokens")
    prompt = chat_tokens({"messages": _as_messages(body), "tools": body.get("tools")})
    check_model(body, options)
    if body.get("background") and body.get("store", True):
        message = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise refusal(400, message, "invalid_request_error", "background")
    if (previous := body.get("previous_response_id")) is not None:
        message = f"Response with id '{previous}' not found."
        raise refusal(404, message, "invalid_request_error", "response_id")
    check_sampling(body)
    return generation(body, options, [prompt], asked, fault, name="max_output_tokens")


def _as_messages(body: Body) -> list[dict[str, Any]]:
    if "input" not in body:
        raise missing(body, "input")
    given = body["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else [_message(item) for item in given]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    return messages


def _message(item: dict[str, Any]) -> dict[str, Any]:
    content = item.get("content", json.dumps(item))
    if isinstance(content, list):
        content = [{"type": "text", "text": part.get("text", "")} for part in content]
    return {"role": item.get("role", "user"), "content": content}


def whole_response(job: Job, answer_id: str, options: Options) -> bytes:
    text = "".join(job.choices[0])
    return compact(_response(job, answer_id, [_output(f"msg_{secrets.token_hex(8)}", text)], is_over=True))


def _output(item_id: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    return {"id": item_id, "content": [part], "role": "assistant", "status": "completed", "type": "message",
            "phase": None}  # fmt: skip


def _response(job: Job, answer_id: str, output: list[dict[str, Any]], *, is_over: bool) -> dict[str, Any]:
    generated = sum(map(len, job.choices))
    is_cut = is_over and job.finish == "length"
    usage = {
        "input_tokens": job.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [],
                                 "cached_tokens_per_turn": []},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
                                  "tool_output_tokens_per_turn": []},
        "total_tokens": job.prompt_tokens + generated,
    }  # fmt: skip
    return {
        "id": answer_id,
        "created_at": job.created,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": job.body.get("instructions"),
        "metadata": None,
        "model": job.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": float(job.body.get("temperature") or 0),
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": job.body.get("max_output_tokens"),
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": ("incomplete" if is_cut else "completed") if is_over else "in_progress",
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": usage if is_over and not job.fault.no_usage else None,
        "user": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


class ResponseEvents:
    """The only choice's text as one message item with one part."""

    def __init__(self, job: Job, answer_id: str, options: Options) -> None:
        self._job = job
        self._id = answer_id
        self._item = f"msg_{secrets.token_hex(8)}"
        self._at = {"content_index": 0, "item_id": self._item, "output_index": 0}
        self._number = -1
        self._text: list[str] = []

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return named(kind, {**fields, "sequence_number": self._number, "type": kind})

    def opening(self) -> list[bytes]:
        begun = {"response": _response(self._job, self._id, [], is_over=False)}
        item = _output(self._item, "") | {"content": [], "status": "in_progress"}
        part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event("response.created", begun),
            self._event("response.in_progress", begun),
            self._event("response.output_item.added", {"item": item, "output_index": 0}),
            self._event("response.content_part.added", {**self._at, "part": part}),
        ]

    def token(self, choice: int, piece: str) -> bytes:
        self._text.append(piece)
        return self._event("response.output_text.delta", {**self._at, "delta": piece, "logprobs": []})

    def last(self, choice: int, piece: str, finish: str) -> bytes:
        return self.token(choice, piece)

    def closing(self) -> list[bytes]:
        item = _output(self._item, "".join(self._text))
        return [
            self._event("response.output_text.done", {**self._at, "logprobs": [], "text": "".join(self._text)}),
            self._event("response.content_part.done", {**self._at, "part": item["content"][0]}),
            self._event("response.output_item.done", {"item": item, "output_index": 0}),
        ]

    def done(self) -> bytes:
        item = _output(self._item, "".join(self._text))
        return self._event("response.completed", {"response": _response(self._job, self._id, [item], is_over=True)})

    def failed(self) -> bytes | None:
        return None  # vLLM's generator raises, and its server cuts the connection
