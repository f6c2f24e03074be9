"""Shapes of vLLM 0.32's answers and stream events, as `probes.py` expects them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from contract.shapes import either

NAME = "tiny"
MAX_LEN = 2048

_CHAT_ID, _TEXT_ID = re.compile(r"chatcmpl-\S+"), re.compile(r"cmpl-\S+")
_FINGERPRINT = re.compile(r"vllm-0\.\d+\.\S+")
_COUNTS = {"prompt_tokens": int, "total_tokens": int, "completion_tokens": int}
_END = {
    "logprobs": None,
    "finish_reason": either("stop", "length"),
    "stop_reason": either(None, int),
    "token_ids": None,
}
_ANSWER = {
    "created": int,
    "model": NAME,
    "service_tier": None,
    "system_fingerprint": _FINGERPRINT,
    "usage": _COUNTS | {"prompt_tokens_details": None, "completion_tokens_details": None},
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
_MESSAGE = {
    "role": "assistant",
    "content": str,
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "reasoning": None,
}
CHAT = _ANSWER | {
    "id": _CHAT_ID,
    "object": "chat.completion",
    "choices": [{"index": int, "message": _MESSAGE, **_END, "routed_experts": None}],
    "prompt_logprobs": None,
    "prompt_token_ids": None,
    "prompt_text": None,
}
_TEXT_CHOICE = {"index": int, "text": str, **_END}
TEXT = _ANSWER | {
    "id": _TEXT_ID,
    "object": "text_completion",
    "choices": [_TEXT_CHOICE | {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}],
}
MODEL = {
    "id": NAME,
    "object": "model",
    "created": int,
    "owned_by": "vllm",
    "root": str,
    "parent": None,
    "max_model_len": MAX_LEN,
    "permission": [dict],
}
TOKENS = {"count": int, "max_model_len": MAX_LEN, "tokens": [int], "token_strs": None}


@dataclass(frozen=True)
class Stream:
    """Shapes of a stream's events: `first` and `last` of each choice, its tokens between them, `usage`, then [DONE]."""

    first: dict[str, Any] | None
    token: dict[str, Any]
    last: dict[str, Any]
    usage: dict[str, Any] | None = None
    choices: int = 1
    tokens: int = 3  # of each choice; the real engine may put several into one event when it is busy


def chat_stream(*, usage: bool = False, each: bool = False, choices: int = 1) -> Stream:
    """The stream of a chat; `usage` as include_usage asks for it, `each` as continuous_usage_stats does."""
    event = {"id": _CHAT_ID, "object": "chat.completion.chunk", "created": int, "model": NAME}
    role = {"role": "assistant", "content": ""}
    first = {"index": int, "delta": role, "logprobs": None, "finish_reason": None}
    token = {"index": int, "delta": {"content": str}, **_END, "finish_reason": None}
    del token["stop_reason"]
    last = {"index": int, "delta": {"content": str}, **_END}
    running = _running_usage(each)
    return Stream(
        first=event | {"choices": [first], "prompt_token_ids": None, "prompt_text": None} | running,
        token=event | {"choices": [token]} | running,
        last=event | {"choices": [last]} | running | _fingerprint(not usage),
        usage=_usage_event(event) if usage else None,
        choices=choices,
    )


def text_stream(*, usage: bool = False, choices: int = 1) -> Stream:
    """The stream of a completion: no role event."""
    event = {"id": _TEXT_ID, "object": "text_completion", "created": int, "model": NAME}
    last = _TEXT_CHOICE | {"prompt_token_ids": None}
    return Stream(
        first=None,
        token=event | {"choices": [last | {"finish_reason": None, "stop_reason": None}]},
        last=event | {"choices": [last]} | _fingerprint(not usage),
        usage=_usage_event(event) if usage else None,
        choices=choices,
    )


def error(status: int, message: str, type_: str = "BadRequestError", param: Any = None) -> dict[str, Any]:
    """vLLM's usual error object, the message as a pattern."""
    return {"error": {"message": re.compile(message, re.DOTALL), "type": type_, "param": param, "code": status}}


def _usage_event(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"choices": [], "usage": _COUNTS} | _fingerprint(True)


def _running_usage(each: bool) -> dict[str, Any]:
    return {"usage": _COUNTS | {"completion_tokens_details": None}} if each else {}


def _fingerprint(shown: bool) -> dict[str, Any]:
    return {"system_fingerprint": _FINGERPRINT} if shown else {}
