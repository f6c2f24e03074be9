"""Whether a reply of the fuzz test is what its engine sent, a beginning of it, or tells an error."""

from __future__ import annotations

import json

from fakes.client import Reply

from .fuzz_mixes import MARKS, Ask

COMMENT = b": keep-alive\n\n"


def judge(ask: Ask, reply: Reply) -> None:
    """What came has to be a beginning of what the engine sent, or tell an error."""
    if not ask.is_stream:
        if ask.ending.isdigit():
            assert reply.status == {"500": 502, "503": 503, "400": 400}[ask.ending], (ask, reply)
        elif ask.is_sound or ask.ending == "error event":
            assert reply.status == 200 and ask.body.startswith(reply.body), (ask, reply)
        else:
            assert reply.status in (502, 504), (ask, reply)
        if reply.is_whole and reply.status != 200:
            assert "error" in json.loads(reply.body)
        return
    if reply.status != 200:
        assert not ask.is_sound and reply.status in (400, 502, 503, 504), (ask, reply)
        assert not reply.is_whole or "error" in json.loads(reply.body)
        return
    body = reply.body
    while body.startswith(COMMENT) or b"\n\n" + COMMENT in body:
        body = body.removeprefix(COMMENT).replace(b"\n\n" + COMMENT, b"\n\n")
    if not reply.is_whole:
        judge_part(ask, body)
    elif ask.is_sound:
        assert body == ask.sent, (ask, body[-300:])
    elif ask.has_error_event and body == ask.sent:
        pass
    else:
        assert MARKS.get(ask.endpoint, b"[DONE]") not in body, (ask, body[-300:])
        *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
        assert "error" in json.loads(last.partition(b"data: ")[2]), (ask, body[-300:])
        whole = b"".join(event + b"\n\n" for event in events)
        # half an event may stand before the error, on a line of its own
        assert ask.sent.startswith(whole) or ask.sent.startswith(whole.rstrip(b"\n")), (ask, body[-300:])


def judge_part(ask: Ask, body: bytes) -> None:
    """The caller left before the end: a beginning of the stream, then perhaps that of a comment or an error event."""
    begun = next((size for size in range(len(COMMENT) - 1, 0, -1) if body.endswith(COMMENT[:size])), 0)
    if ask.sent.startswith(body) or ask.sent.startswith(body[: len(body) - begun]):
        return
    assert not ask.is_sound, (ask, body[-300:])
    shared = next((i for i, (a, b) in enumerate(zip(body, ask.sent, strict=False)) if a != b), len(ask.sent))
    boundary = body.rfind(b"\n\n", 0, shared) + 2 if b"\n\n" in body[:shared] else 0
    heads = (b'data: {"error"', b"event: error\n")
    rests = [body[i:].removeprefix(b"\n\n") for i in (boundary, shared, shared - 1)]
    assert any(rest.startswith(head) or head.startswith(rest) for rest in rests for head in heads), (ask, body[-300:])
