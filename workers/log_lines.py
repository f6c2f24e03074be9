"""What a line of vLLM's log says: the phase of a start, or why it failed. Pure; called by `logs.py` and `worker.py`.

Patterns are from logs of vLLM 0.26 to 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_CAUSE = 400

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=12) ERROR 11-30 20:25:27 [core.py:1510] ValueError: …": both parts may be missing
_PREFIX = re.compile(
    r"^(?:\([\w.-]+ (?:pid=\d+)\)\s?)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?"
)

_PHASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Resolved architecture: (\w+)"), "reading the model ({0})"),
    (re.compile(r"Fetching \d+ files:.*?(\d+)/(\d+)"), "downloading {0}/{1} files"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"Starting to load model|Loading model from scratch"), "loading weights"),
    (re.compile(r"Loading \S+ checkpoint shards:.*?(\d+)/(\d+)"), "loading weights {0}/{1}"),
    (re.compile(r"Loading weights took"), "weights loaded"),
    (re.compile(r"Model loading took ([\d.]+ GiB)"), "weights loaded ({0})"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph|Start compiling function"), "compiling"),
    (re.compile(r"Memory profiling takes|Available KV cache memory"), "profiling memory"),
    (re.compile(r"Capturing CUDA graphs?.*?(\d+)/(\d+)"), "capturing graphs {0}/{1}"),
    (re.compile(r"Graph capturing finished"), "warming up kernels"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache of {0} tokens"),
    (re.compile(r"init engine \("), "engine initialized"),
    (re.compile(r"Starting vLLM server|Starting vLLM API server"), "starting server"),
)

_ARGPARSE = re.compile(r"^vllm[\w. -]*: error: (?P<text>.+)")
_PYDANTIC = re.compile(r"^\s*(?:Value|Assertion) error, (?P<text>.+?)(?: \[type=.*)?$")
_EXCEPTION = re.compile(r"^(?P<name>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|NotFound))(?:: (?P<text>.+))?$")
# "Free memory on device (124/139 GiB) on startup." alone is what a healthy start says
_OUT_OF_MEMORY = re.compile(
    r"(?P<text>(?:CUDA out of memory|CUDA error: out of memory|Free memory on device.*is less than).*)"
)
_SAYS_NOTHING = re.compile(
    r"Engine core initialization failed|validation errors? for|WorkerProc initialization failed"
    r"|engine core exited unexpectedly|EngineCore encountered an issue"
)
_PLAIN_CLASSES = frozenset({"ValueError", "RuntimeError", "Exception", "AssertionError"})  # their text is enough


def plain(line: str) -> str:
    """The line without colours and without vLLM's prefix of process, level, time and place."""
    return _PREFIX.sub("", _ANSI.sub("", line), count=1).rstrip()


def phase_of(line: str) -> str | None:
    """The phase that this line announces, in words for the status page; None for most lines."""
    for pattern, words in _PHASES:
        if match := pattern.search(line):
            return words.format(*match.groups())
    return None


def names_a_cause(line: str) -> bool:
    """Whether the line may be why a start failed: those are kept when the others scroll away."""
    return _cause_in(plain(line)) is not None or _SAYS_NOTHING.search(line) is not None


def cause_of(lines: Iterable[str]) -> str:
    """Why the process ended, in words: the FIRST error of the log, since later ones only report its consequences.

    Falls back to a line that says little, then to the last line; "" for an empty log.
    """
    last = vague = ""
    for line in map(plain, lines):
        if cause := _cause_in(line):
            return cause[:MAX_CAUSE]
        if not vague and _SAYS_NOTHING.search(line):
            vague = line.strip()
        last = line.strip() or last
    return (vague or last)[:MAX_CAUSE]


def _cause_in(line: str) -> str | None:
    """`line` is plain. None when it is no cause, or one that only points at another line."""
    if _SAYS_NOTHING.search(line):
        return None
    if match := _ARGPARSE.match(line) or _PYDANTIC.match(line):
        return match["text"]
    if match := _EXCEPTION.match(line):
        name, text = match["name"], match["text"]
        if not text:
            return name
        return text if name.rpartition(".")[2] in _PLAIN_CLASSES else f"{name.rpartition('.')[2]}: {text}"
    if match := _OUT_OF_MEMORY.search(line):
        return match["text"]
    return None
