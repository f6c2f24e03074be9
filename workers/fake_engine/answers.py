"""The JSON of completions, key for key as vLLM 0.32.0 writes it; `api.py` sends what this builds.

A stream's events are glued from parts made once per choice, so that the fake stays cheaper than what it loads.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

from workers.fake_engine.checks import Job
from workers.fake_engine.options import VERSION, Options

DONE = b"data: [DONE]\n\n"
ENGINE_DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
# vLLM writes this one event with json's default separators
ERROR_EVENT = b"data: " + json.dumps(ENGINE_DEAD).encode() + b"\n\n"
FINGERPRINT = f"vllm-{VERSION}-fake0000"


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def compact(value: object) -> bytes:
    """JSON as vLLM writes it: no blanks, characters beyond ASCII as they are."""
    return _ENCODER.encode(value).encode(errors="surrogatepass")


def named(kind: str, fields: dict[str, Any]) -> bytes:
    """An event that has a name besides its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), compact(fields))


@lru_cache(maxsize=4096)
def _quoted(piece: str) -> bytes:
    return compact(piece)


class StreamEvents:
    """Builds the events of one stream in the order: roles (chat only), tokens, usage."""

    def __init__(self, job: Job, answer_id: str, options: Options) -> None:
        self._job = job
        kind = "chat.completion.chunk" if job.chat else "text_completion"
        head = {"id": answer_id, "object": kind, "created": job.created, "model": job.model}
        self._head = b"data: " + compact(head)[:-1] + b',"choices":['
        self._before = [self._head + self._choice_head(at) for at in range(len(job.choices))]
        if job.chat:
            self._after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        else:
            self._after = (
                b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
            )
        self._generated = [0] * len(job.choices)
        self._extra = compact(job.fault.extra_delta)[1:-1] if job.fault.extra_delta else b""

    def _choice_head(self, choice: int) -> bytes:
        return b'{"index":%d,%b' % (choice, b'"delta":{"content":' if self._job.chat else b'"text":')

    def opening(self) -> list[bytes]:
        """The roles of a chat's choices."""
        return [self._role(choice) for choice in range(len(self._job.choices))] if self._job.chat else []

    def _role(self, choice: int) -> bytes:
        body = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % choice
        return self._head + body + self._usage(choice, first=True) + b',"prompt_token_ids":null,"prompt_text":null}\n\n'

    def token(self, choice: int, piece: str) -> bytes:
        """One token that is not the last of its choice."""
        self._generated[choice] += 1
        extra = b"," + self._extra if self._extra else b""
        return b"".join((self._before[choice], _quoted(piece), extra, self._after, self._usage(choice), b"}\n\n"))

    def last(self, choice: int, piece: str, finish: str) -> bytes:
        """The token with the finish reason; it carries the fingerprint when no usage event follows."""
        self._generated[choice] += 1
        if self._job.chat:
            tail = b'},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null}]'
        else:
            tail = (
                b',"logprobs":null,"finish_reason":"%b","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
            )
        extra = b"," + self._extra if self._extra else b""
        fingerprint = b"" if self._job.include_usage else b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
        return b"".join(
            (
                self._before[choice],
                _quoted(piece),
                extra,
                tail % finish.encode(),
                self._usage(choice),
                fingerprint,
                b"}\n\n",
            )
        )

    def closing(self) -> list[bytes]:
        """The event before [DONE] that include_usage asks for: no choices."""
        if not self._job.include_usage:
            return []
        usage: dict[str, Any] = _counts(self._job, sum(self._generated))
        return [self._head + b'],"usage":' + compact(usage) + b',"system_fingerprint":"%b"}\n\n' % FINGERPRINT.encode()]

    def done(self) -> bytes:
        return DONE

    def failed(self) -> bytes | None:
        """vLLM's words for a dead engine core."""
        return ERROR_EVENT + DONE

    def _usage(self, choice: int, first: bool = False) -> bytes:
        if not self._job.continuous_usage:
            return b""
        usage = _counts(self._job, 0 if first else self._generated[choice])
        return b',"usage":' + compact(usage | {"completion_tokens_details": None})


def whole(job: Job, answer_id: str, options: Options) -> bytes:
    """The answer that is not streamed."""
    choices = [_choice(job, at, "".join(tokens)) for at, tokens in enumerate(job.choices)]
    usage: dict[str, Any] = _counts(job, sum(map(len, job.choices)))
    usage["prompt_tokens_details"] = {"cached_tokens": 0, "created_cache_tokens": 0} if options.prompt_details else None
    usage["completion_tokens_details"] = None
    answer: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion" if job.chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": None if job.fault.no_usage else usage,
    }
    if job.chat:
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    return compact(answer | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})


def _choice(job: Job, at: int, text: str) -> dict[str, Any]:
    end = {"logprobs": None, "finish_reason": job.finish, "stop_reason": None, "token_ids": None}
    if not job.chat:
        return {"index": at, "text": text, **end, "prompt_logprobs": None, "prompt_token_ids": None,
                "routed_experts": None}  # fmt: skip
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None,
               "function_call": None, "reasoning": None}  # fmt: skip
    return {"index": at, "message": message, **end, "routed_experts": None}


def _counts(job: Job, generated: int) -> dict[str, Any]:
    total = job.prompt_tokens + generated
    return {"prompt_tokens": job.prompt_tokens, "total_tokens": total, "completion_tokens": generated}
