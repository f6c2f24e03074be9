"""Shapes of vLLM 0.32's answers on the other proxied paths, as `probes_paths.py` expects them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from contract.answers import NAME
from contract.shapes import either

_RESPONSE_ID, _ITEM_ID = re.compile(r"resp_\S+"), re.compile(r"msg_\S+")
_PER_TURN: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
_RESPONSE_USAGE = {
    "input_tokens": int,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **_PER_TURN},
    "output_tokens": 3,
    "output_tokens_details": {
        "reasoning_tokens": 0,
        "tool_output_tokens": 0,
        "output_tokens_per_turn": [],
        "tool_output_tokens_per_turn": [],
    },
    "total_tokens": int,
}
_PART = {"annotations": [], "text": str, "type": "output_text", "logprobs": None}
_ITEM = {
    "id": _ITEM_ID,
    "content": [_PART],
    "role": "assistant",
    "status": "completed",
    "type": "message",
    "phase": None,
}
RESPONSE = {
    "id": _RESPONSE_ID,
    "created_at": int,
    "incomplete_details": {"reason": "max_output_tokens"},
    "instructions": either(None, str),
    "metadata": None,
    "model": NAME,
    "object": "response",
    "output": [_ITEM],
    "parallel_tool_calls": True,
    "temperature": float,
    "tool_choice": "none",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_output_tokens": 3,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "status": "incomplete",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "usage": _RESPONSE_USAGE,
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "input_messages": None,
    "output_messages": None,
}
_BEGUN = RESPONSE | {"incomplete_details": None, "output": [], "status": "in_progress", "usage": None}

_MESSAGE_USAGE = {"input_tokens": int, "output_tokens": 3}
MESSAGE = {
    "id": re.compile(r"chatcmpl-\S+"),
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": str}],
    "model": NAME,
    "stop_reason": "max_tokens",
    "usage": _MESSAGE_USAGE,
}
_MESSAGE_BEGUN = MESSAGE | {
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": int, "output_tokens": 0},
}

_POOLED_USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens": 0,
    "prompt_tokens_details": None,
    "completion_tokens_details": None,
}
_LIST = {"object": "list", "created": int, "model": NAME, "usage": _POOLED_USAGE}
_SCORE_ID = re.compile(r"score-\S+")
SCORES = _LIST | {"id": _SCORE_ID, "data": [{"index": int, "object": "score", "score": float}]}
RERANKED = {
    "id": _SCORE_ID,
    "model": NAME,
    "usage": {"prompt_tokens": int, "total_tokens": int},
    "results": [{"index": int, "document": {"text": str, "multi_modal": None}, "relevance_score": float}],
}


def embeddings(embedding: Any) -> dict[str, Any]:
    data = [{"index": int, "object": "embedding", "embedding": embedding}]
    return _LIST | {"id": re.compile(r"embd-\S+"), "data": data}


@dataclass(frozen=True)
class Named:
    """Shapes of a stream of named events: those before the pieces of the answer, one piece, those after."""

    before: tuple[tuple[str, dict[str, Any]], ...]
    piece: tuple[str, dict[str, Any]]
    after: tuple[tuple[str, dict[str, Any]], ...]


def _response_event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return kind, fields | {"sequence_number": int, "type": kind}


_PLACE = {"content_index": 0, "item_id": _ITEM_ID, "output_index": 0}
RESPONSE_STREAM = Named(
    before=(
        _response_event("response.created", response=_BEGUN),
        _response_event("response.in_progress", response=_BEGUN),
        _response_event(
            "response.output_item.added", item=_ITEM | {"content": [], "status": "in_progress"}, output_index=0
        ),
        _response_event("response.content_part.added", part=_PART | {"text": "", "logprobs": []}, **_PLACE),
    ),
    piece=_response_event("response.output_text.delta", delta=str, logprobs=[], **_PLACE),
    after=(
        _response_event("response.output_text.done", text=str, logprobs=[], **_PLACE),
        _response_event("response.content_part.done", part=_PART, **_PLACE),
        _response_event("response.output_item.done", item=_ITEM, output_index=0),
        _response_event("response.completed", response=RESPONSE),
    ),
)


def _message_event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return kind, {"type": kind} | fields


MESSAGE_STREAM = Named(
    before=(
        _message_event("message_start", message=_MESSAGE_BEGUN),
        _message_event("content_block_start", content_block={"type": "text", "text": ""}, index=0),
    ),
    piece=_message_event("content_block_delta", delta={"type": "text_delta", "text": str}, index=0),
    after=(
        _message_event("content_block_stop", index=0),
        _message_event(
            "message_delta", delta={"stop_reason": "max_tokens", "stop_sequence": None}, usage=_MESSAGE_USAGE
        ),
        _message_event("message_stop"),
    ),
)


def anthropic_error(message: str, type_: str = "BadRequestError") -> dict[str, Any]:
    """Anthropic's error object as vLLM fills it, the message as a pattern."""
    return {"type": "error", "error": {"type": type_, "message": re.compile(message, re.DOTALL)}}
