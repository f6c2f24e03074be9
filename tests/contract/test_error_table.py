"""docs/errors.md, the error classes and the table in edge/respond.py say the same; every error has a row in each."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway
from gateway.domain.endpoint import ErrorShape
from gateway.domain.errors import ConfigError, GatewayError, LimitExceeded, Retry, Source, WorkerError, WrongMethod
from gateway.edge import front
from gateway.edge.respond import ANTHROPIC_TYPES, STATUS, TYPES, error_body, error_headers, event_of, status_of
from gateway.upstream import forward

DOCUMENT = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
NOT_FOR_CALLERS = (ConfigError, WorkerError)  # and all below them: told on the command line and in the log


def subclasses(of: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for child in of.__subclasses__():
        if not issubclass(child, NOT_FOR_CALLERS) and child.__module__.startswith("gateway."):
            yield child
            yield from subclasses(child)


for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
ERRORS = sorted(set(subclasses(GatewayError)), key=lambda error: error.__name__)


def an_error(kind: type[GatewayError]) -> GatewayError:
    if issubclass(kind, WrongMethod):
        return kind("x", "POST")
    error = kind("x")
    if kind.retry is Retry.LATER:
        error.retry_after_s = 1.5
    return error


def rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading: code → its other cells."""
    section = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    found = {cells[0].strip("`"): cells[1:] for cells in table}
    assert len(found) == len(table), "a code stands there twice"
    return found


CODES = rows("Codes of the gateway")
ONLY_LOGGED = rows("Only in the access log")
OF_THE_SERVER = dict(re.findall(r'_refuse\((?:\d+), .*?, "(\w+)"\)()', inspect.getsource(front)))
OF_THE_RECORD = set(re.findall(r"Outcome\(.*, (\w+)\.code\)", inspect.getsource(forward)))


def test_the_walk_finds_the_errors() -> None:
    assert len(ERRORS) > 15 and LimitExceeded in ERRORS


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_a_status(kind: type[GatewayError]) -> None:
    assert status_of(an_error(kind)) == STATUS[kind]


def test_the_table_has_no_row_for_an_error_that_is_none() -> None:
    assert set(STATUS) == set(ERRORS)


def test_codes_are_unique() -> None:
    assert len({kind.code for kind in ERRORS}) == len(ERRORS)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_openais_object_with_its_source_told(kind: type[GatewayError]) -> None:
    error = an_error(kind)
    document = json.loads(error_body(error))
    assert document == {
        "error": {"message": "x", "type": TYPES.get(STATUS[kind], "internal_error"), "param": None, "code": kind.code}
    }
    headers = dict(error_headers(error))
    assert headers[b"x-poolgate-error-source"].decode() in set(Source)
    assert headers[b"content-type"] == b"application/json"
    assert headers.get(b"retry-after") == (b"2" if kind.retry is Retry.LATER else None)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_anthropics_shape_too_and_is_an_event_of_that_name(kind: type[GatewayError]) -> None:
    error = an_error(kind)
    body = error_body(error, ErrorShape.ANTHROPIC)
    document = json.loads(body)
    status = STATUS[kind]
    expected = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    assert document == {"type": "error", "error": {"type": expected, "message": "x"}}
    assert event_of(body, ErrorShape.ANTHROPIC) == b"event: error\ndata: " + body + b"\n\n"
    assert event_of(error_body(error), ErrorShape.OPENAI) == b"data: " + error_body(error) + b"\n\n"


def test_anthropics_types_stand_in_the_documentation() -> None:
    section = DOCUMENT.partition("## Anthropic's shape\n")[2].partition("\n## ")[0]
    assert {int(status): kind for status, kind in re.findall(r"\| (\d+) \| `(\w+)` \|", section)} == ANTHROPIC_TYPES


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind.code not in ONLY_LOGGED])
def test_every_error_stands_in_the_documentation_as_it_is(kind: type[GatewayError]) -> None:
    status, type_, source, retry, meaning, way_out = CODES[kind.code]
    assert int(status) == STATUS[kind]
    assert type_.strip("`") == TYPES.get(STATUS[kind], "internal_error")
    assert (source, retry) == (kind.source.value, kind.retry.value)
    assert meaning and way_out


def test_what_only_the_access_log_shows_stands_in_the_documentation() -> None:
    by_code = {kind.code: kind for kind in ERRORS}
    assert {"EngineFailed", "EngineDied"} == OF_THE_RECORD
    assert "`engine_failed` or `engine_died` with status 200" in DOCUMENT
    assert set(ONLY_LOGGED) == {"client_closed_request"}
    assert int(ONLY_LOGGED["client_closed_request"][0]) == STATUS[by_code["client_closed_request"]]


def test_the_documentation_names_no_code_that_does_not_exist() -> None:
    assert {"invalid_request", "request_head_too_large"} == set(OF_THE_SERVER)
    assert set(CODES) | set(ONLY_LOGGED) == {kind.code for kind in ERRORS} | set(OF_THE_SERVER)


def test_the_statuses_that_are_passed_on_stand_in_the_documentation() -> None:
    text = re.search(r"refuses in the request itself \(([\d, ]+)\)", DOCUMENT)
    assert text is not None
    assert {int(status) for status in text[1].split(",")} == set(forward.PASSED_ON)
