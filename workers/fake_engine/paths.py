"""The paths on which an engine core works: how each reads its body, which job that is, and how it is answered.

`api.py` makes a handler of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.fake_engine.answers import StreamEvents, whole
from workers.fake_engine.checks import Job, job_of
from workers.fake_engine.kinds import Kind
from workers.fake_engine.messages import MessageEvents, message_job, whole_message
from workers.fake_engine.options import Options
from workers.fake_engine.pooling import (
    embedding_job,
    rerank_job,
    score_job,
    whole_embeddings,
    whole_rerank,
    whole_score,
)
from workers.fake_engine.responses import ResponseEvents, response_job, whole_response
from workers.fake_engine.schema import Body, decode
from workers.fake_engine.speech import TranscriptionEvents, form_of, transcription_job, whole_transcription


@dataclass(frozen=True, slots=True)
class Path:
    job_for: Callable[[Body, Options], Job]
    kind: Kind
    read: Callable[[str | None, bytes], Body] = decode


CHAT = Kind("chatcmpl-", whole, StreamEvents)
TEXT = Kind("cmpl-", whole, StreamEvents)
_RERANK = Path(rerank_job, Kind("score-", whole_rerank))
_SCORE = Path(score_job, Kind("score-", whole_score))


def paths_of(options: Options) -> dict[str, Path]:
    """Those of a model that generates, or of one that pools."""
    if not options.pooling:
        paths = {
            "/v1/chat/completions": Path(lambda body, options: job_of(body, options, chat=True), CHAT),
            "/v1/completions": Path(lambda body, options: job_of(body, options, chat=False), TEXT),
            "/v1/responses": Path(response_job, Kind("resp_", whole_response, ResponseEvents)),
            "/v1/messages": Path(message_job, Kind("chatcmpl-", whole_message, MessageEvents)),
        }
        if options.transcription:
            kind = Kind("trsc-", whole_transcription, TranscriptionEvents)
            paths["/v1/audio/transcriptions"] = Path(transcription_job, kind, form_of)
        return paths
    paths = {
        "/v1/rerank": _RERANK,
        "/v2/rerank": _RERANK,
        "/rerank": _RERANK,
        "/v1/score": _SCORE,
        "/score": _SCORE,
    }
    if not options.classify:
        paths["/v1/embeddings"] = Path(embedding_job, Kind("embd-", whole_embeddings))
    return paths
