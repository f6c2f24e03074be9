"""Does a request fit, and how many tokens does it reserve? Called by dispatch before any budget is charged.

Design: a byte-level tokenizer never makes more tokens than bytes. So a body whose bytes and output fit a window needs
no counting; only in the grey zone is the prompt counted, by a worker's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from gateway.domain.endpoint import Rules
from gateway.domain.errors import BadRequest, ContextTooLong
from gateway.domain.request import InferenceRequest
from gateway.domain.route import Route
from gateway.domain.windows import Windows

TEMPLATE_TOKENS = 256  # what a chat template may add of its own; our margin, SmolLM2's adds 31
MAX_TOKEN_BYTES = 128  # the longest tokens of today's vocabularies are runs of that many blanks
BYTES_PER_TOKEN = 4  # English text in JSON; only for the reservation of an uncounted prompt
UNKNOWN_OUTPUT = 1024  # reserved where neither caller nor route nor path limits the output; settling corrects it


class Fit(NamedTuple):
    """`pools` can hold the request; `output_for` says which output limit goes into the body for one of them."""

    pools: frozenset[str]
    prompt_tokens: int  # counted, or estimated from the bytes
    reserve_tokens: int
    write_output: int | None  # the route's cap where it has to be written
    was_clamped: bool  # the caller asked for more than the cap
    was_counted: bool  # `prompt_tokens` is exact, and of one prompt

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
    windows: Windows,
    count: Callable[[], Awaitable[int | None]],
) -> Fit:
    """Checks the request against the window of every pool of its order (None: unknown, the engine decides).

    `count` gives the prompt's exact tokens, or None when no worker can say. Raises ContextTooLong or BadRequest.
    """
    rules = request.endpoint.rules
    asked, was_clamped = capped(request.max_output_tokens, route, request.output_field)
    output = asked or len(rules.output_fields[:1])  # "as much as there is room for" needs room for one token
    largest = windows.largest
    if largest is not None and output and output >= largest:
        raise ContextTooLong(
            f"This model's window is {largest} tokens; {_asks(request, output)}, which leaves no room for a prompt.",
            param=request.output_field,
        )
    most_bytes = (largest or request.body_bytes) * MAX_TOKEN_BYTES
    if request.body_bytes > most_bytes and request.is_countable and (size := prompt_bytes(request)) > most_bytes:
        # counting megabytes would hold up an engine's other callers, to say what is sure already
        raise ContextTooLong(
            f"This model's window is {largest} tokens; the prompt is {size} bytes long, which is more than "
            f"{size // MAX_TOKEN_BYTES} tokens. Shorten the prompt.",
            param=prompt_field(request),
        )
    if not rules.costs_tokens:
        return Fit(windows.pools, 0, 0, None, was_clamped=False, was_counted=True)
    prompt = request.prompt_ids  # token ids are counted already; each of several prompts has a window of its own
    longest = request.longest_ids
    bound = longest if prompt is not None else 1 if request.is_multimodal else request.body_bytes + TEMPLATE_TOKENS
    fits_all = windows.smallest is not None and bound + output <= windows.smallest  # nearly always
    pools = windows.pools if fits_all else holding(bound + output, windows)
    if len(pools) < len(windows) and not request.is_multimodal:  # media: the route's order stands, the engine decides
        if prompt is None and request.is_countable and (counted := await count()) is not None:
            prompt = longest = counted
        if prompt is not None:
            pools = holding(longest + output, windows)
            if not pools:
                raise too_long(request, longest, output, most_of(windows))
        elif not pools:
            # nobody could count it: the engine with the largest window decides, and no smaller one gets it
            most = most_of(windows)
            pools = frozenset(p for p, w in windows.items() if w == most)
    room = largest if pools is windows.pools and largest is not None else room_in(pools, windows)
    was_counted = prompt is not None and request.prompts == 1
    if prompt is None:
        prompt = estimate(request, route)
        if room is not None:
            prompt = min(prompt, room * request.prompts)
    write = asked if was_clamped else None
    if asked is None and rules.output_fields and route.max_output_tokens is not None:
        # a cap is no default: completions end after 16 tokens of their own accord
        is_needed = rules.output_default is None or route.max_output_tokens < rules.output_default
        write = route.max_output_tokens if is_needed else None
    of_each = prompt if request.prompts == 1 else longest  # what a window has to hold beside one answer
    reserve = prompt + request.n * (asked or _unsaid(rules, write, room, of_each))
    return Fit(pools, prompt, reserve, write, was_clamped, was_counted)


def estimate(request: InferenceRequest, route: Route) -> int:
    """Tokens of a prompt that nobody counted: text by its bytes, each image and the like by the route's rule."""
    text_bytes, media_tokens = request.body_bytes + request.repeated_bytes, 0
    if request.media is not None:
        text_bytes -= request.media.body_bytes
        media_tokens = request.media.tokens(route.media_tokens)
    return media_tokens - text_bytes // -BYTES_PER_TOKEN


def most_of(windows: Windows) -> int:
    """The largest window that is known; only where one is."""
    return max(window for window in windows.values() if window is not None)


def room_in(pools: frozenset[str], windows: Windows) -> int | None:
    return max((w for p, w in windows.items() if p in pools and w is not None), default=None)


def prompt_field(request: InferenceRequest) -> str:
    """The field that holds most of the prompt."""
    names = request.endpoint.rules.prompt_fields
    return next((name for name in names if name in request.fields), names[0])


def prompt_bytes(request: InferenceRequest) -> int:
    fields = request.fields
    return sum(len(bytes(fields[name])) for name in request.endpoint.rules.prompt_fields if name in fields)


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
        no_room = ", which leaves no room for an answer" if output else ""
        return ContextTooLong(
            f"This model's window is {window} tokens; the prompt has {prompt}{no_room}. Shorten the prompt.",
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


def _unsaid(rules: Rules, write: int | None, room: int | None, prompt: int) -> int:
    """The output to reserve for each answer where the caller names no limit."""
    if not rules.output_fields:
        return 0
    most = write or rules.output_default or UNKNOWN_OUTPUT
    return most if room is None else max(1, min(most, room - prompt))
