"""pydantic's errors as lines of ours: key path, what is wrong, the way out, never the value. Called by load.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

# by pydantic's error type; {…} is filled from the error's context
WORDS = {
    "extra_forbidden": "unknown key; remove it or check its spelling (docs/config.md lists all keys)",
    "missing": "is missing; add it",
    "string_pattern_mismatch": "does not have the right form; it must match {pattern}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list: [ … ]",
    "dict_type": "must be a table: {{ … }}",
    "model_type": "must be a table: {{ … }}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "too_short": "is empty; give at least one",
    "string_too_short": "is empty; give a name",
    "string_too_long": "must have at most {max_length} characters",
}
# what people write who mean the key itself
CLEAR_KEYS = {
    *(("extra_forbidden", name) for name in ("key", "api_key", "value", "token", "secret")),
    ("string_pattern_mismatch", "sha256"),
}
SECTIONS_OF_TABLES = (("pools",), ("routes",), ("classes",))


def lines_of(error: ValidationError) -> list[str]:
    """One line per key. What a key with several allowed types has to say is put together."""
    said: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        words = _words(fault["loc"], fault["type"], fault["msg"], fault.get("ctx") or {})
        known = said.setdefault(key_path(fault["loc"]), [])
        if words not in known:
            known.append(words)
    return [f"{path}: {', or '.join(words)}" for path, words in said.items()]


def key_path(loc: Sequence[int | str]) -> str:
    """('pools', 'a', 'replicas', 0, 'gpus') → 'pools.a.replicas[0].gpus'."""
    out = ""
    for i, part in enumerate(loc):
        if isinstance(part, int):
            out += f"[{part}]"
        elif part == "[key]":
            out += " (its name)"
        elif i == len(loc) - 1 and i > 0 and _is_branch(part):
            continue
        else:
            out += f".{part}" if out else str(part)
    return out or "(top level)"


def _is_branch(part: str) -> bool:
    """Whether pydantic put in the name of one type of a union, as in ('gpus', 0, 'int')."""
    return part in ("str", "int", "float", "bool") or part.startswith(("list[", "dict["))


def _words(loc: Sequence[int | str], kind: str, message: str, context: dict[str, Any]) -> str:
    if loc[0] == "keys" and (kind, loc[-1]) in CLEAR_KEYS:
        return "a key does not belong in this file in clear; give key_env, or sha256 (printf %s KEY | sha256sum)"
    if kind == "too_short" and loc in SECTIONS_OF_TABLES:
        return f"is empty; define at least one [{loc[0]}.NAME]"
    words = WORDS.get(kind)
    return words.format(**context) if words else message.removeprefix("Value error, ")
