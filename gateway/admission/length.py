"""Does a request fit, and how many tokens does it reserve? Called by dispatch before any budget is charged.

Design: a byte-level tokenizer never makes more tokens than bytes. So a body whose bytes and output fit a window needs
no counting; only in the grey zone is the prompt counted, by a worker's own tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.domain.errors import BadRequest, ContextTooLong
from gateway.domain.request import Endpoint, InferenceRequest
from gateway.domain.route import Route

TEMPLATE_TOKENS = 256  # what a chat template may add of its own; our margin, SmolLM2's adds 31
BYTES_PER_TOKEN = 4  # English text in JSON; only for the reservation of an uncounted prompt
COMPLETION_DEFAULT = 16  # vLLM's max_tokens for /v1/completions when the client says nothing
UNKNOWN_OUTPUT = 1024  # reserved for a chat that names no limit on a route without a cap; settling corrects it


@dataclass(frozen=True, slots=True)
class Fit:
    """`pools` can hold the request. `write_output` is the output limit to put into the body; None leaves it alone."""

    pools: frozenset[str]
    prompt_tokens: int  # counted, or estimated from the bytes
    reserve_tokens: int
    write_output: int | None
    was_clamped: bool


async def fit(
    request: InferenceRequest,
    route: Route,
    windows: Mapping[str, int | None],
    count: Callable[[], Awaitable[int | None]],
) -> Fit:
    """Checks the request against the window of every pool of its order (None: unknown, the engine decides).

    `count` gives the prompt's exact tokens, or None when no worker can say. Raises ContextTooLong or BadRequest.
    """
    asked, was_clamped = capped(request.max_output_tokens, route, request.output_field)
    output = asked or 1  # "as much as there is room for" needs room for one token
    known = [w for w in windows.values() if w is not None]
    largest = max(known) if known and len(known) == len(windows) else None
    if largest is not None and output >= largest:
        raise ContextTooLong(
            f"This model's window is {largest} tokens; {request.output_field} asks for {output}, which leaves no room "
            "for a prompt.",
            param=request.output_field,
        )
    bound = request.body_bytes + TEMPLATE_TOKENS + output
    pools = holding(bound, windows)
    prompt: int | None = None
    if len(pools) < len(windows):
        prompt = await count() if request.is_countable else None
        if prompt is not None:
            pools = holding(prompt + output, windows)
            if not pools:
                raise too_long(prompt, request.max_output_tokens and output, max(known), request.output_field)
        elif not pools:
            # nobody could count it: the engine with the largest window decides, and no smaller one gets it
            pools = frozenset(p for p, w in windows.items() if w == max(known))
    room = max((w for p, w in windows.items() if p in pools and w is not None), default=None)
    if prompt is None:
        estimate = math.ceil(request.body_bytes / BYTES_PER_TOKEN)
        prompt = estimate if room is None else min(estimate, room)
    write = asked if was_clamped else None
    if request.max_output_tokens is None and route.max_output_tokens is not None:
        write = route.max_output_tokens if room is None else max(1, min(route.max_output_tokens, room - prompt))
    reserve = prompt + request.n * (asked or write or _unsaid(request.endpoint, room, prompt))
    return Fit(pools, prompt, reserve, write, was_clamped)


def holding(tokens: int, windows: Mapping[str, int | None]) -> frozenset[str]:
    """The pools whose window takes that many tokens, or is not known."""
    return frozenset(pool for pool, window in windows.items() if window is None or tokens <= window)


def capped(asked: int | None, route: Route, field: str) -> tuple[int | None, bool]:
    """The asked output under the route's cap, and whether it was cut. Raises BadRequest where the route refuses."""
    cap = route.max_output_tokens
    if asked is None or cap is None or asked <= cap:
        return asked, False
    if not route.clamp_output:
        raise BadRequest(f"'{field}' is {asked}; this model allows at most {cap} output tokens.", param=field)
    return cap, True


def too_long(prompt: int, output: int | None, window: int, field: str) -> ContextTooLong:
    if output is None:
        return ContextTooLong(
            f"This model's window is {window} tokens; the prompt has {prompt}, which leaves no room for an answer. "
            "Shorten the prompt.",
            param="messages",
        )
    return ContextTooLong(
        f"This model's window is {window} tokens; the prompt has {prompt} and {field} asks for {output}, "
        f"together {prompt + output}. Shorten the prompt or lower {field}.",
        param=field,
    )


def _unsaid(endpoint: Endpoint, room: int | None, prompt: int) -> int:
    if endpoint is Endpoint.COMPLETIONS:
        return COMPLETION_DEFAULT
    return UNKNOWN_OUTPUT if room is None else max(1, min(UNKNOWN_OUTPUT, room - prompt))
