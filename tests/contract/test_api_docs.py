"""docs/api.md names every path, header, owned and denied field, and every number of the rules as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.admission import length
from gateway.domain.endpoint import Counts, Endpoint, StreamEnd
from gateway.domain.request import RateState
from gateway.edge import blocks
from gateway.edge.fields import DENIED_FIELDS, MAX_N
from gateway.edge.form import MAX_PARTS
from gateway.edge.front import HEAD_BYTES
from gateway.edge.messages import ROLES
from gateway.edge.prompts import MAX_PROMPTS
from gateway.edge.respond import rate_lines
from gateway.fleet.registry import ASIDE_S
from gateway.upstream.attempt import PASSED_HEADERS
from gateway.upstream.forward import STREAM_HEADERS
from gateway.upstream.retry import BURST, MAX_REFUSED
from gateway.upstream.usage import TEXT_TYPES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EDGE = "\n".join(path.read_text() for path in Path(length.__file__).parents[1].glob("edge/*.py"))
FORWARD = (Path(length.__file__).parents[1] / "upstream" / "forward.py").read_text()


def section(heading: str) -> str:
    text = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", DOCUMENT, re.M | re.S)
    assert text is not None, heading
    return text[2]


def first_cells(heading: str) -> set[str]:
    """Everything between backticks in the first column of the table under a heading."""
    cells = [line.split(" | ")[0] for line in section(heading).splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_proxied_paths_are_all_there() -> None:
    assert {endpoint.value for endpoint in Endpoint} <= first_cells("Paths")
    controllers = set(re.findall(r'(?:path = |@get\()"(/[a-z0-9/]+)"', EDGE))
    assert first_cells("Paths") == {e.value for e in Endpoint} | controllers | {"/v1/models/{id}"}


def test_every_denied_field_is_there_and_no_other() -> None:
    assert first_cells("Fields that cannot be set") == DENIED_FIELDS


def test_the_owned_fields_are_there() -> None:
    owned = {"model", "stream", "stream_options"}
    for rules in (endpoint.rules for endpoint in Endpoint if not endpoint.rules.is_form):
        owned |= {*rules.output_fields, *rules.answer_fields, *rules.prompt_fields, *rules.stateful_fields}
        owned |= {name for name, _ in rules.allowed_values}
    owned.discard("instructions")  # part of a response's prompt, and carried like any other field
    assert first_cells("Fields that the gateway owns") == owned
    assert owned.isdisjoint(DENIED_FIELDS)


def cells_of(endpoint: Endpoint) -> list[str]:
    row = next(line for line in section("Each path").splitlines() if line.startswith("| `") and f"`{endpoint}`" in line)
    return [cell.strip() for cell in row.strip("|").split(" | ")]


@pytest.mark.parametrize("endpoint", Endpoint)
def test_the_row_of_each_path_is_that_of_the_table(endpoint: Endpoint) -> None:
    rules = endpoint.rules
    _, model, streams, output, usage, defaults, priority = cells_of(endpoint)
    assert ("form" in model) == rules.is_form
    assert streams.startswith("yes" if rules.streams else "no")
    marks = {StreamEnd.DONE: "[DONE]", StreamEnd.RESPONSE: "response.completed", StreamEnd.MESSAGE_STOP: "message_stop"}
    assert rules.end is StreamEnd.NONE or marks[rules.end] in streams
    assert tuple(re.findall(r"`(\w+)`", output)) == rules.output_fields
    assert (usage == "costs no tokens") == (not rules.costs_tokens)
    names = {Counts.PROMPT: "prompt_tokens", Counts.INPUT: "input_tokens"}
    assert rules.usage is Counts.NONE or names[rules.usage] in usage
    assert (defaults, priority) == tuple("yes" if it else "no" for it in (rules.takes_defaults, rules.takes_priority))


def test_every_header_that_is_read_is_there() -> None:
    read = {name.decode() for name in PASSED_HEADERS}
    read |= set(re.findall(r'(?:header\(b|_fields\.get\(b|name == b)"([a-z-]+)"', EDGE))
    assert first_cells("Request headers") == read


def test_every_header_that_is_written_is_there() -> None:
    every_rate = RateState(1, 1, 1.0, 1, 1, 1.0)
    rates = {line.partition(b":")[0].decode() for line in rate_lines(every_rate).splitlines()}
    written = rates | {name.decode() for name, _ in STREAM_HEADERS}
    written |= set(re.findall(r'\(\s*b"([a-z-]+)",', EDGE + FORWARD))  # pairs of name and value
    written |= set(re.findall(r'(?:b"|\\r\\n)([a-z-]+): ', EDGE)) - {"data", "event"}  # lines of a head
    assert len(rates) == 6 and {"x-request-id", "connection", "x-poolgate-pool"} <= written
    assert first_cells("Reply headers") == written - {"content-type", "content-length", "transfer-encoding"}


def test_the_numbers_of_the_rules_are_those_of_the_code() -> None:
    fields = section("Fields that the gateway owns")
    assert f"from 1 to {MAX_N};" in fields
    assert f"at most {MAX_PROMPTS} prompts" in fields
    default = Endpoint.COMPLETIONS.rules.output_default
    assert f"default of {default} tokens" in fields
    assert all(f"`{role}`" in fields for role in (*ROLES, *blocks.ROLES))
    assert f"at most {MAX_PARTS} parts" in section("Forms") and f"`n` at most {MAX_N}" in section("Forms")
    assert all(f"`{kind.decode()}`" in section("Forms") for kind in TEXT_TYPES)
    assert f"{HEAD_BYTES // 1024} KiB together" in section("Request headers")
    assert f"body, {length.TEMPLATE_TOKENS} tokens for the chat template" in section("Length")
    assert f"{length.MAX_TOKEN_BYTES} bytes for each token" in section("Length")
    again = section("What is tried again")
    assert f"after {MAX_REFUSED} of them" in again and f"left out for {ASIDE_S:g} s" in again
    assert BURST == 10 and "ten at once" in (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    cost = section("What a request costs")
    assert length.BYTES_PER_TOKEN == 4 and "a quarter of the body's bytes" in cost
    assert f"{default} tokens for a completion" in cost and f"the cap, else {length.UNKNOWN_OUTPUT}" in cost
