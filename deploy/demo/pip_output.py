"""What commands' output means for a person: what pip is at, and what to do about a failure. Pure; for `prepare.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

_FILE = re.compile(
    r"^\s*(Downloading|Using cached|Processing) (?:\S*/)?(\S+?)(\.metadata)?(?: \((\d[^)]*B)\))?(?: \(from .*\))?$"
)
_VERBS = {"Downloading": "downloading", "Using cached": "from pip's cache:", "Processing": "unpacking"}

# first match wins: a pattern in a command's last lines, and the way out
_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"No space left on device"),
        "The disk is full: make room and run the same command again.",
    ),
    (
        re.compile(r"Failed to infer device type|CUDA driver|libcuda\.so"),
        "vLLM is installed but finds no working NVIDIA driver: see what nvidia-smi says and try again. "
        "The build for the CPU is the other way: make serve DEVICE=cpu.",
    ),
    (
        re.compile(r"ensurepip is not available|No module named '?(?:ensurepip|venv|pip)\b"),
        "This Python cannot make virtual environments. Debian and Ubuntu: apt-get install python3-venv "
        "(for the version in use, e.g. python3.12-venv); then run the same command again.",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError"),
        "The package index's certificate is not trusted here. Behind a company proxy, point PIP_CERT to its "
        "certificate file and run the same command again.",
    ),
    (
        re.compile(
            r"Temporary failure in name resolution|Name or service not known|Network is unreachable|No route to host"
            r"|Failed to establish a new connection|Connection refused|ConnectTimeout|[Rr]ead timed out"
            r"|Max retries exceeded|Connection broken|Could not connect to proxy|Cannot connect to proxy|ProxyError"
        ),
        "The package index cannot be reached. Check the network, the proxy variables and `pip config list` "
        "(a local mirror is set there); what is already installed stays, so run the same command again.",
    ),
    (
        re.compile(r"HTTP error 4\d\d|40[13] Client Error|User for "),
        "The package index refuses us. Check the index and its credentials in `pip config list`.",
    ),
    (
        re.compile(r"ResolutionImpossible"),
        "pip's own settings forbid a version that is needed: see `pip config list` for a constraints file.",
    ),
    (
        re.compile(r"No matching distribution found for|is not a supported wheel on this platform"),
        "The package index has no build of this package for this Python and processor. CPython 3.11 or 3.12 on x86-64 "
        "Linux is what we test; choose one with `make PYTHON=python3.12 …`.",
    ),
    (
        re.compile(r"Permission denied|Read-only file system"),
        "A folder cannot be written. Check who owns this checkout.",
    ),
)


def describe(line: str) -> str | None:
    """A note of a few words for one line of pip's output; None where it tells nothing new."""
    if match := _FILE.match(line):
        verb, name, is_metadata, size = match.groups()
        if is_metadata or line.lstrip().startswith("Processing ./"):
            return None
        return f"{_VERBS[verb]} {_package(name)}" + (f" ({size})" if size else "")
    text = line.strip()
    if text.startswith("Collecting "):
        return f"looking up {text.split()[1]}"
    if text.startswith("Installing collected packages:"):
        return f"installing {packages(text.count(',') + 1)}"
    if match := re.match(r"Building (?:wheel|editable) for (\S+) \(.*started", text):
        return f"building {match[1]}"
    if "Retrying (" in text or "Connection interrupted" in text:
        return "the package index does not answer; trying again"
    return None


def packages(count: int) -> str:
    return "1 package" if count == 1 else f"{count} packages"


def _package(file_name: str) -> str:
    """`numpy-2.3.5-cp311-….whl` → `numpy 2.3.5`; anything else as it is."""
    name = unquote(file_name)
    parts = name.removesuffix(".whl").split("-")
    return f"{parts[0]} {parts[1]}" if name.endswith(".whl") and len(parts) >= 5 else name


def has_no_match(tail: Sequence[str], package: str) -> bool:
    """pip looked, and the index does not carry the one `package` that was asked for (as against: was not reached).

    With a constraints file in its settings, pip calls the same thing a conflict between the user and the constraint.
    """
    told = (f"No matching distribution found for {package}", f"Cannot install {package}")
    return any(text in line for line in tail for text in told) and not any("Retrying (" in line for line in tail)


def explain(code: int, tail: Sequence[str]) -> str:
    """The way out of a failed command, in words. `code` is its exit code (negative: the signal that ended it)."""
    if code == -9:
        return "It was killed, most likely because memory ran out: close other programs and run the same command again."
    text = "\n".join(tail)
    for pattern, way_out in _CAUSES:
        if pattern.search(text):
            return way_out
    return "Run the same command again; if it fails in the same place, the log says more."
