"""/v1/audio/transcriptions after vLLM 0.32's source: a form in, a transcript out, plain or streamed.

No recording is listened to: the words follow from its bytes. Not checked against a real engine, for want of a model.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from workers.fake_engine.answers import DONE, ERROR_EVENT, compact
from workers.fake_engine.checks import Job, check_model, fault_in
from workers.fake_engine.engine import pieces_of, words
from workers.fake_engine.options import Options
from workers.fake_engine.schema import Body, missing, refusal, schema_error

_BOUNDARY = re.compile(r'multipart/form-data;\s*boundary="?([^";]+)"?', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition: form-data; name="([^"]*)"', re.IGNORECASE)
_FORMATS = ("text", "json", "verbose_json", "diarized_json")


def form_of(content_type: str | None, raw: bytes) -> Body:
    """Each part's text by its name; the file's bytes as text of one character each. Raises Refusal."""
    match = _BOUNDARY.match(content_type or "")
    if match is None:
        raise schema_error("body.file", "missing", "Field required", None)
    fields: dict[str, Any] = {}
    for part in raw.split(b"--" + match[1].encode())[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if name is not None:
            is_file = b"filename" in head
            value = value.removesuffix(b"\r\n")
            fields[name[1].decode()] = value.decode("latin-1" if is_file else "utf-8")
    if "x_fake" in fields:
        fields["x_fake"] = json.loads(fields["x_fake"])
    return fields


def transcription_job(body: Body, options: Options) -> Job:
    """Raises Refusal."""
    if "file" not in body:
        raise missing(body, "file")
    check_model(body, options)
    if body.get("response_format", "json") not in _FORMATS:
        raise refusal(400, f"Currently only support response_format: {', '.join(_FORMATS)}")
    fault = fault_in(body)
    text = pieces_of(fault.text) if fault.text is not None else words(body["file"], 0, fault.tokens or options.tokens)
    return Job(
        stream=body.get("stream", "false").lower() in ("true", "1"),
        created=int(time.time()),
        model=options.names[0],
        prompt_tokens=1,
        choices=[text],
        finish="stop",
        priority=0,
        request_id=None,
        fault=fault,
        body=body,
    )


def whole_transcription(job: Job, answer_id: str, options: Options) -> bytes:
    return compact({"text": "".join(job.choices[0]), "usage": {"type": "duration", "seconds": 1}})


class TranscriptionEvents:
    """Chunks like a chat's, without a role event and without usage."""

    def __init__(self, job: Job, answer_id: str, options: Options) -> None:
        head = {"id": answer_id, "object": "transcription.chunk", "created": job.created, "model": job.model}
        self._head = b"data: " + compact(head)[:-1]

    def opening(self) -> list[bytes]:
        return []

    def token(self, choice: int, piece: str) -> bytes:
        return self._chunk(piece, None)

    def last(self, choice: int, piece: str, finish: str) -> bytes:
        return self._chunk(piece, finish)

    def _chunk(self, piece: str, finish: str | None) -> bytes:
        choices = [{"delta": {"content": piece}, "finish_reason": finish, "stop_reason": None}]
        return self._head + b',"choices":' + compact(choices) + b"}\n\n"

    def closing(self) -> list[bytes]:
        return []

    def done(self) -> bytes:
        return DONE

    def failed(self) -> bytes | None:
        return ERROR_EVENT + DONE
