"""AccessLog over sinks that block, fail and count: bounded, never in a request's way, nothing lost at a clean end."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pytest
from fakes.story import a_record

from gateway.domain.record import AccessRecord
from gateway.telemetry import access
from gateway.telemetry.access import ATOMIC_BYTES, AccessLog, line_of


class Sink:
    """Takes writes while `is_open` is set; the next write raises `fails_once_with` if there is one."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.reached = threading.Event()
        self.writes: list[bytes] = []
        self.wrote = threading.Event()
        self.fails_once_with: Exception | None = None

    def fileno(self) -> int:
        raise OSError("a sink has no descriptor")

    def write(self, data: bytes) -> int:
        self.reached.set()
        self.is_open.wait()
        if (failure := self.fails_once_with) is not None:
            self.fails_once_with = None
            raise failure
        self.writes.append(data)
        self.wrote.set()
        return len(data)

    def flush(self) -> None:
        pass

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in b"".join(self.writes).splitlines()]


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    yield made
    made.is_open.set()


def record(request_id: str = "req-1") -> AccessRecord:
    made = a_record()
    made.request_id = request_id
    return made


def log_to(sink: Sink) -> AccessLog:
    return AccessLog(cast(BinaryIO, sink))


def test_records_that_wait_are_written_at_a_clean_end(sink: Sink) -> None:
    log = log_to(sink)
    for i in range(200):
        log.write(record(f"req-{i}"))
    log.close(10)
    assert [line["request_id"] for line in sink.lines()] == [f"req-{i}" for i in range(200)]
    assert log.dropped == 0


def test_a_stuck_sink_costs_new_records_and_no_memory(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "MAX_WAITING", 5)
    sink.is_open.clear()
    log = log_to(sink)
    log.write(record("first"))
    assert sink.reached.wait(10)
    for i in range(20):
        log.write(record(f"req-{i}"))
    assert log.dropped == 15
    sink.is_open.set()
    log.close(10)
    assert [line["request_id"] for line in sink.lines()] == ["first", "req-0", "req-1", "req-2", "req-3", "req-4"]
    assert "access records not written: 15" in caplog.text


def test_the_end_does_not_wait_for_a_stuck_sink_longer_than_told(sink: Sink, caplog: pytest.LogCaptureFixture) -> None:
    sink.is_open.clear()
    log = log_to(sink)
    log.write(record())
    assert sink.reached.wait(10)
    log.write(record())
    log.close(0.01)
    assert "access records not written: 1" in caplog.text


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), BrokenPipeError(), ValueError("closed file")]
)
def test_a_full_disk_or_a_closed_pipe_drops_and_counts_and_goes_on(sink: Sink, failure: Exception) -> None:
    sink.is_open.clear()
    log = log_to(sink)
    log.write(record())
    assert sink.reached.wait(10)
    log.write(record("later"))
    sink.fails_once_with = failure
    sink.is_open.set()
    log.close(10)
    assert [line["request_id"] for line in sink.lines()] == ["later"]
    assert log.dropped == 1


def test_no_write_is_longer_than_a_pipe_takes_whole(sink: Sink) -> None:
    sink.is_open.clear()
    log = log_to(sink)
    for i in range(100):
        log.write(record(f"req-{i}"))
    sink.is_open.set()
    log.close(10)
    assert len(sink.lines()) == 100
    assert all(len(write) <= ATOMIC_BYTES and write.endswith(b"\n") for write in sink.writes)
    assert len(sink.writes) < 50, "lines that wait together go together"


def test_a_thread_that_gets_no_turn_is_given_one(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "PAUSE_S", 3600)
    monkeypatch.setattr(access, "STARVED_S", 0)
    log = log_to(sink)
    log.write(record("first"))
    assert sink.wrote.wait(10)
    sink.wrote.clear()
    log.write(record("second"))
    assert sink.wrote.wait(10), "it went on with its pause"
    log.close(10)
    assert [line["request_id"] for line in sink.lines()] == ["first", "second"]


# --- the line -----------------------------------------------------------------------------------------------


def test_a_line_is_one_json_object_with_the_records_fields() -> None:
    made = record()
    made.model, made.ttft_s, made.total_s = "a\nb\u2028", 0.123456, 2.0
    line = line_of(made)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    fields = json.loads(line)
    assert set(fields) == set(AccessRecord.__slots__) - {"began_s"} | {"log", "at_s"}
    assert (fields["log"], fields["model"], fields["ttft_s"], fields["total_s"]) == (
        "access",
        "a\nb\u2028",
        0.1235,
        2.0,
    )


def test_the_record_has_no_place_for_prompts_outputs_or_keys() -> None:
    assert set(AccessRecord.__slots__) == {
        *("request_id", "method", "path", "revision", "began_s", "key_id", "user", "class_name", "model", "route"),
        *("pool", "replica", "stream", "status", "ending", "error_code", "prompt_tokens", "completion_tokens"),
        *("attempts", "admit_s", "queue_s", "ttft_s", "total_s"),
    }


def test_a_longest_line_is_shorter_than_a_pipe_takes_whole() -> None:
    made = record("r" * 128)
    made.model = "\u0001" * 128  # as long as the handler lets a model name be, each character six bytes long
    for name in ("key_id", "user", "class_name", "route", "pool", "replica"):
        setattr(made, name, "n" * 256)
    assert len(line_of(made)) <= ATOMIC_BYTES


def test_plain_files_are_sinks() -> None:
    out = io.BytesIO()
    log = AccessLog(out)
    log.write(record())
    log.close(10)
    assert json.loads(out.getvalue())["request_id"] == "req-1"
