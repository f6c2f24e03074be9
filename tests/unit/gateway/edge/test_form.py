"""decode_form: which forms are read, that gateway and engine cannot see two different ones, and what is refused."""

from __future__ import annotations

import httpx
import pytest
from fakes.bodies import BOUNDARY, FORM_TYPE, SOUND, form, part, transcription
from fakes.story import ALICE
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import BadRequest
from gateway.domain.request import InferenceRequest
from gateway.edge.decode import decode
from gateway.edge.fields import DENIED_FIELDS, MAX_N
from gateway.edge.form import MAX_PARTS

FILE = part("file", SOUND, "a.wav")
MODEL = part("model", "chat")


def decoded(body: bytes, content_type: bytes | None = FORM_TYPE) -> InferenceRequest:
    return decode(body, Endpoint.TRANSCRIPTIONS, ALICE, "default", "req-1", content_type)


def refused(body: bytes, content_type: bytes | None = FORM_TYPE) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decoded(body, content_type)
    assert len(caught.value.message) < 500
    return caught.value


def test_the_models_name_is_found_where_it_stands() -> None:
    for body in (form(FILE, MODEL), form(MODEL, FILE), form(part("language", "en"), MODEL, FILE)):
        request = decoded(body)
        assert request.model == "chat" and request.form is not None
        assert body[request.form.model_begin : request.form.model_end] == b"chat"
        assert (request.form.body, request.form.content_type) == (body, FORM_TYPE)


def test_what_httpx_writes_is_read() -> None:
    sent = httpx.Request("POST", "http://x", data={"model": "chat", "stream": "true"}, files={"file": ("ü.wav", SOUND)})
    request = decoded(sent.read(), sent.headers["content-type"].encode())
    assert (request.model, request.stream) == ("chat", True)


@pytest.mark.parametrize(
    ("value", "is_stream"),
    [("true", True), ("True", True), ("1", True), ("on", True), ("false", False), ("0", False), ("", False)],
)
def test_stream_is_read_as_the_engine_reads_it(value: str, is_stream: bool) -> None:
    assert decoded(transcription(stream=value)).stream is is_stream


def test_a_stream_that_is_neither_is_refused() -> None:
    assert refused(transcription(stream="maybe")).param == "stream"
    assert refused(transcription(stream="x" * 2000)).param == "stream"


@pytest.mark.parametrize("name", sorted(DENIED_FIELDS))
def test_a_denied_field_is_refused_in_a_form_too(name: str) -> None:
    assert refused(transcription(**{name: "1"})).param == name
    assert refused(form(FILE, MODEL, part(name, "1", "a.json"))).param == name


def test_a_form_without_model_or_file_is_refused() -> None:
    assert refused(form(FILE)).param == "model"
    assert refused(form(FILE, part("model", ""))).param == "model"
    assert refused(form(FILE, part("model", "chat", "a.txt"))).param == "model"
    assert refused(form(MODEL)).param == "file"
    assert refused(form(MODEL, part("file", "x"))).param == "file"


@pytest.mark.parametrize("name", ["model", "stream", "n"])
def test_a_field_that_is_there_twice_is_refused_for_two_readers_could_take_two_values(name: str) -> None:
    assert refused(form(FILE, MODEL, part(name, "1"), part(name, "1"))).param == name


def test_n_is_a_small_number() -> None:
    assert decoded(transcription(n=str(MAX_N))).n == 1  # of beams, not of answers
    for value in ("0", "-1", str(MAX_N + 1), "x", "1.5", "٣"):
        assert refused(transcription(n=value)).param == "n"


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/mixed; boundary=x",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"x" * 71,
        b"multipart/form-data; boundary=other",
        FORM_TYPE + b"; boundary=other",
        FORM_TYPE + b"; charset=utf-8",
    ],
)
def test_a_type_that_does_not_name_this_forms_boundary_is_refused(content_type: bytes | None) -> None:
    refused(form(FILE, MODEL), content_type)


def test_the_boundary_may_be_quoted_and_the_type_in_any_case() -> None:
    quoted = f'Multipart/Form-Data; Boundary="{BOUNDARY}"'.encode()
    assert decoded(form(FILE, MODEL), quoted).model == "chat"


def head(line: bytes) -> bytes:
    return f"--{BOUNDARY}\r\n".encode() + line + b"\r\n\r\nchat\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"preamble\r\n" + form(FILE, MODEL),
        b"\r\n" + form(FILE, MODEL),
        form(FILE, MODEL) + b"more",
        form(FILE, MODEL)[:-6],
        form(FILE, MODEL).replace(b"\r\n", b"\n"),
        form(FILE, MODEL)[: len(FILE) + 40],
        form(FILE, head(b"Content-Disposition: form-data; name=model")),
        form(FILE, head(b"Content-Disposition: form-data; name*=utf-8''model")),
        form(FILE, head(b'Content-Disposition: form-data; name="a"; name="model"')),
        form(FILE, head(b'Content-Disposition: form-data; name="mo\\"del"')),
        form(FILE, head(b'Content-Disposition: attachment; name="model"')),
        form(FILE, head(b'Content-Disposition: form-data;\r\n name="model"')),
        form(FILE, head(b'Content-Disposition : form-data; name="model"')),
        form(FILE, head(b'Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="model"')),
        form(FILE, head(b"Content-Type: text/plain")),
        form(FILE, head(b'Content-Disposition: form-data; name="\xff"')),
        form(FILE, MODEL.replace(BOUNDARY.encode() + b"\r\n", BOUNDARY.encode() + b" \r\n")),
        form(FILE, MODEL, head(b"X-Long: " + b"x" * 5000)),
        form(*[part("a", "b")] * (MAX_PARTS + 1)),
    ],
)
def test_whatever_two_readers_could_read_differently_is_refused(body: bytes) -> None:
    refused(body)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([FILE, MODEL, b"\r\n", b"--", BOUNDARY.encode(), b'name="model"', b"\x00"]), max_size=9)
)
def test_any_bytes_are_a_request_or_a_bad_request(pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    try:
        request = decoded(body)
    except BadRequest:
        return
    assert request.form is not None
    assert body[request.form.model_begin : request.form.model_end] == request.model.encode()
