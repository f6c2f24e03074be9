"""/v1/embeddings, rerank and score as vLLM 0.32.0 answers them; vectors and scores mean nothing."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any, Final

from workers.fake_engine.answers import compact
from workers.fake_engine.checks import Job, check_length, check_model, count, generating_nothing
from workers.fake_engine.options import Options
from workers.fake_engine.schema import Body, missing, refusal

_DIMENSIONS: Final = 64
_SPECIAL: Final = 2  # tokens around each text
_PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def embedding_job(body: Body, options: Options) -> Job:
    """Raises Refusal."""
    if "input" not in body:
        raise missing(body, "input")
    lengths = [tokens for _, tokens in _inputs(body)]
    check_model(body, options)
    if not lengths:
        raise refusal(400, "You must pass at least one prompt")
    if body.get("dimensions") is not None:
        message = (
            f"Model '{options.names[0]}' does not support Matryoshka embeddings; dimensions must be unset "
            f"(received dimensions={body['dimensions']})."
        )
        raise refusal(400, message)
    cut = body.get("truncate_prompt_tokens")
    if cut is not None:
        lengths = [min(length, options.max_model_len if cut == -1 else cut) for length in lengths]
    return _job(body, options, lengths)


def _inputs(body: Body) -> list[tuple[str, int]]:
    given = body["input"]
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    return [(str(one), count(one) + _SPECIAL if isinstance(one, str) else len(one)) for one in given]


def whole_embeddings(job: Job, answer_id: str, options: Options) -> bytes:
    data = [
        {"index": at, "object": "embedding", "embedding": _vector(text, job.body.get("encoding_format"))}
        for at, (text, _) in enumerate(_inputs(job.body))
    ]
    answer = {"id": answer_id, "object": "list", "created": job.created, "model": job.model, "data": data}
    return compact(answer | _usage(job))


def _vector(text: str, encoding: str | None) -> list[float] | str:
    seed = zlib.crc32(text.encode(errors="replace"))
    packed = struct.pack(f"<{_DIMENSIONS}f", *(((seed * (at + 1)) % 2001 - 1000) / 8000 for at in range(_DIMENSIONS)))
    if encoding == "base64":
        return base64.b64encode(packed).decode()
    return list(struct.unpack(f"<{_DIMENSIONS}f", packed))


def rerank_job(body: Body, options: Options) -> Job:
    """Raises Refusal."""
    for name in ("query", "documents"):
        if name not in body:
            raise missing(body, name)
    return _pair_job(body, options, [body["query"]], _texts(body["documents"]))


def whole_rerank(job: Job, answer_id: str, options: Options) -> bytes:
    documents = _texts(job.body["documents"])
    results: list[dict[str, Any]] = [
        {
            "index": at,
            "document": {"text": text, "multi_modal": None},
            "relevance_score": _score(job.body["query"], text),
        }
        for at, text in enumerate(documents)
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    usage = {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens}
    shown = results[: job.body.get("top_n") or len(results)]
    return compact({"id": answer_id, "model": job.model, "usage": usage, "results": shown})


def score_job(body: Body, options: Options) -> Job:
    """Raises Refusal."""
    ones, others = _pair(body)
    return _pair_job(body, options, ones, others)


def whole_score(job: Job, answer_id: str, options: Options) -> bytes:
    ones, others = _pair(job.body)
    ones = ones * len(others) if len(ones) == 1 else ones
    data = [
        {"index": at, "object": "score", "score": _score(one, other)}
        for at, (one, other) in enumerate(zip(ones, others, strict=True))
    ]
    answer = {"id": answer_id, "object": "list", "created": job.created, "model": job.model, "data": data}
    return compact(answer | _usage(job))


def _pair(body: Body) -> tuple[list[str], list[str]]:
    for one, other in _PAIRS:
        if one in body and other in body:
            return _texts(body[one]), _texts(body[other])
    raise missing(body, "text_1")


def _texts(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _pair_job(body: Body, options: Options, ones: list[str], others: list[str]) -> Job:
    check_model(body, options)
    if not others:
        raise refusal(400, "At least one text_pair element must be given")
    if len(ones) not in (1, len(others)):
        raise refusal(400, "Input lengths must be either 1:1, 1:N or N:N")
    ones = ones * len(others) if len(ones) == 1 else ones
    return _job(body, options, [count(a) + count(b) + _SPECIAL for a, b in zip(ones, others, strict=True)])


def _job(body: Body, options: Options, lengths: list[int]) -> Job:
    check_length(max(lengths), options)
    return generating_nothing(body, options, sum(lengths))


def _score(one: str, other: str) -> float:
    return (zlib.crc32(f"{one}\n{other}".encode(errors="replace")) % 9973) / 9973


def _usage(job: Job) -> dict[str, Any]:
    if job.fault.no_usage:
        return {"usage": None}
    counts = {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens, "completion_tokens": 0}
    return {"usage": counts | {"prompt_tokens_details": None, "completion_tokens_details": None}}
