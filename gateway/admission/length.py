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
MAX_TOKEN_BYTES = 128  # the longest tokens of today's vocabularies are runs of that many blanks
BYTES_PER_TOKEN = 4  # English text in JSON; only for the reservation of an uncounted prompt
COMPLETION_DEFAULT = 16  # vLLM's max_tokens for /v1/completions when the client says nothing
UNKNOWN_OUTPUT = 1024  # reserved for a chat that names no limit on a route without a cap; settling corrects it


@dataclass(frozen=True, slots=True)
class Fit:
    """`pools` can hold the request; `output_for` says which output limit goes into the body for one of them."""

    pools: frozenset[str]
    prompt_tokens: int  # counted, or estimated from the bytes
    reserve_tokens: int
    write_output: int | None  # the route's cap where it has to be written
    was_clamped: bool  # the caller asked for more than the cap
    was_counted: bool  # `prompt_tokens` is exact

    def output_for(self, window: int | None) -> int | None:
        """The output limit to write for an engine with that window; None leaves the body alone.

        What the caller did not ask for must not get it refused: vLLM answers 400 to a limit above its window, while
        it cuts prompt + limit to the window silently.
        """
        if self.write_output is None or self.was_clamped or window is None:
            return self.write_output
        prompt_tokens = self.prompt_tokens if self.was_counted else 1  # an estimate may be far too high
        return max(1, min(self.write_output, window - prompt_tokens))


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
            f"This model's window is {largest} tokens; {_asks(request, output)}, which leaves no room for a prompt.",
            param=request.output_field,
        )
    if largest is not None and request.is_countable and (size := prompt_bytes(request)) > largest * MAX_TOKEN_BYTES:
        # counting megabytes would hold up an engine's other callers, to say what is sure already
        raise ContextTooLong(
            f"This model's window is {largest} tokens; the prompt is {size} bytes long, which is more than "
            f"{size // MAX_TOKEN_BYTES} tokens. Shorten the prompt.",
            param=prompt_field(request),
        )
    bound = 1 if request.is_multimodal else request.body_bytes + TEMPLATE_TOKENS
    pools = holding(bound + output, windows)
    prompt: int | None = None
    if len(pools) < len(windows) and not request.is_multimodal:  # media: the route's order stands, the engine decides
        prompt = await count() if request.is_countable else None
        if prompt is not None:
            pools = holding(prompt + output, windows)
            if not pools:
                raise too_long(request, prompt, output, max(known))
        elif not pools:
            # nobody could count it: the engine with the largest window decides, and no smaller one gets it
            pools = frozenset(p for p, w in windows.items() if w == max(known))
    room = max((w for p, w in windows.items() if p in pools and w is not None), default=None)
    was_counted = prompt is not None
    if prompt is None:
        estimate = math.ceil(request.body_bytes / BYTES_PER_TOKEN)
        prompt = estimate if room is None else min(estimate, room)
    write = asked if was_clamped else None
    if asked is None and route.max_output_tokens is not None:
        # a cap is no default: completions end after 16 tokens of their own accord
        is_needed = request.endpoint is Endpoint.CHAT or route.max_output_tokens < COMPLETION_DEFAULT
        write = route.max_output_tokens if is_needed else None
    reserve = prompt + request.n * (asked or _unsaid(request.endpoint, write, room, prompt))
    return Fit(pools, prompt, reserve, write, was_clamped, was_counted)


def prompt_field(request: InferenceRequest) -> str:
    return "messages" if request.endpoint is Endpoint.CHAT else "prompt"


def prompt_bytes(request: InferenceRequest) -> int:
    return len(bytes(request.fields[prompt_field(request)]))


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


def too_long(request: InferenceRequest, prompt: int, output: int, window: int) -> ContextTooLong:
    field = request.output_field
    if request.max_output_tokens is None:
        return ContextTooLong(
            f"This model's window is {window} tokens; the prompt has {prompt}, which leaves no room for an answer. "
            "Shorten the prompt.",
            param=prompt_field(request),
        )
    return ContextTooLong(
        f"This model's window is {window} tokens; the prompt has {prompt} and {_asks(request, output)}, "
        f"together {prompt + output}. Shorten the prompt or lower {field}.",
        param=field,
    )


def _asks(request: InferenceRequest, output: int) -> str:
    cut = "" if output == request.max_output_tokens else f" (cut to {output}, this model's limit)"
    return f"{request.output_field} asks for {request.max_output_tokens}{cut}"


def _unsaid(endpoint: Endpoint, write: int | None, room: int | None, prompt: int) -> int:
    """The output to reserve where the caller names no limit."""
    most = write or (COMPLETION_DEFAULT if endpoint is Endpoint.COMPLETIONS else UNKNOWN_OUTPUT)
    return most if room is None else max(1, min(most, room - prompt))
