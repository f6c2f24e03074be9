"""fit: which pools can hold a request, what is reserved, what is written into the body, and what a refusal says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes.bodies import CHAT_LIKE
from fakes.story import a_request
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.length import MAX_TOKEN_BYTES, TEMPLATE_TOKENS, UNKNOWN_OUTPUT, Fit, fit
from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import BadRequest, ContextTooLong
from gateway.domain.request import InferenceRequest
from gateway.domain.route import PoolOrder, Route, Target
from gateway.domain.windows import Windows

COMPLETIONS = Endpoint.COMPLETIONS


def route(cap: int | None = None, *, clamp: bool = True) -> Route:
    return Route("chat", (), PoolOrder((Target("a"),)), max_output_tokens=cap, clamp_output=clamp)


def long_request(prompt_bytes: int = 4000, **more: Any) -> InferenceRequest:
    return a_request(messages=[{"role": "user", "content": "x" * prompt_bytes}], **more)


class Counter:
    """A worker's tokenizer: its answer, and how often it was asked."""

    def __init__(self, answer: int | None) -> None:
        self.answer = answer
        self.asked = 0

    async def __call__(self) -> int | None:
        self.asked += 1
        return self.answer


NOT_ASKED = Counter(-1)


@pytest.fixture(autouse=True)
def nobody_asked() -> None:
    NOT_ASKED.asked = 0


async def fitted(
    request: InferenceRequest,
    windows: dict[str, int | None],
    count: Callable[[], Awaitable[int | None]] = NOT_ASKED,
    on: Route | None = None,
) -> Fit:
    return await fit(request, on or route(), Windows(windows), count)


async def refused(
    request: InferenceRequest, windows: dict[str, int | None], count: int | None, on: Route | None = None
) -> ContextTooLong:
    with pytest.raises(ContextTooLong) as caught:
        await fitted(request, windows, Counter(count), on)
    return caught.value


# --- counted only in the grey zone --------------------------------------------------------------------------


async def test_a_request_whose_bytes_fit_is_admitted_without_counting() -> None:
    request = a_request(max_tokens=100)
    window = request.body_bytes + TEMPLATE_TOKENS + 100
    assert (await fitted(request, {"a": window})).pools == {"a"}
    assert NOT_ASKED.asked == 0
    counter = Counter(30)
    assert (await fitted(request, {"a": window - 1}, counter)).prompt_tokens == 30
    assert counter.asked == 1


async def test_prompt_and_output_may_fill_the_window_to_the_last_token() -> None:
    request = long_request(max_tokens=48)
    assert (await fitted(request, {"a": 2048}, Counter(2000))).pools == {"a"}
    await refused(request, {"a": 2048}, 2001)


async def test_only_pools_that_hold_the_request_are_named() -> None:
    request = long_request(max_tokens=100)
    assert (await fitted(request, {"small": 512, "big": 2048, "huge": 8192}, Counter(1000))).pools == {"big", "huge"}


async def test_a_pool_whose_window_is_not_known_leaves_the_decision_to_the_engine() -> None:
    assert (await fitted(long_request(max_tokens=10**6), {"a": None})).pools == {"a"}
    assert NOT_ASKED.asked == 0
    assert (await fitted(long_request(max_tokens=10), {"a": None, "b": 1024}, Counter(5000))).pools == {"a"}


async def test_without_a_count_the_largest_engine_decides_and_no_smaller_one_gets_it() -> None:
    request = long_request(max_tokens=10)
    assert (await fitted(request, {"small": 512, "big": 1024}, Counter(None))).pools == {"big"}


@pytest.mark.parametrize("url", ["data:image/png;base64," + "A" * 40_000, "http://x/y.png"])
async def test_media_go_by_the_routes_order_for_their_bytes_tell_nothing(url: str) -> None:
    image = {"type": "image_url", "image_url": {"url": url}}
    request = a_request(messages=[{"role": "user", "content": [image]}], max_tokens=600)
    made = await fitted(request, {"tiny": 512, "vision": 1024, "large": 32_768})
    assert made.pools == {"vision", "large"}
    assert NOT_ASKED.asked == 0
    with pytest.raises(ContextTooLong):
        await fitted(request, {"tiny": 512})


async def test_an_image_does_not_cut_the_answer_to_one_token() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}
    request = a_request(messages=[{"role": "user", "content": [image]}])
    made = await fitted(request, {"a": 2048}, on=route(cap=1000))
    assert made.output_for(2048) == 1000
    assert made.output_for(512) == 511


async def test_a_prompt_that_nobody_could_count_does_not_either() -> None:
    made = await fitted(long_request(9000), {"a": 2048}, Counter(None), on=route(cap=1000))
    assert made.output_for(2048) == 1000


async def test_several_prompts_are_not_counted_and_go_where_their_bytes_fit() -> None:
    request = a_request(endpoint=COMPLETIONS, prompt=["x" * 600, "y" * 600], max_tokens=10)
    assert (await fitted(request, {"small": 512, "big": 4096})).pools == {"big"}


# --- refusals name the real numbers -------------------------------------------------------------------------


async def test_prompt_8_plus_2045_of_2048_is_refused_with_window_prompt_and_asked_count() -> None:
    error = await refused(a_request(max_tokens=2045), {"a": 2048}, 8)
    for number in ("2048", " 8 ", "2045", "2053"):
        assert number in error.message
    assert error.param == "max_tokens"


async def test_a_prompt_over_the_window_with_no_limit_asked_blames_the_prompt() -> None:
    error = await refused(long_request(), {"a": 2048}, 3000)
    assert "2048" in error.message and "3000" in error.message and "max_tokens" not in error.message
    assert error.param == "messages"
    error = await refused(a_request(endpoint=COMPLETIONS, prompt="x" * 4000), {"a": 2048}, 2048)
    assert error.param == "prompt"


@pytest.mark.parametrize("endpoint", CHAT_LIKE)
async def test_a_prompt_of_megabytes_is_refused_by_its_bytes_and_not_counted(endpoint: Endpoint) -> None:
    text = "x" * 5_000_000
    prompt = {"messages": [{"role": "user", "content": text}]} if endpoint is Endpoint.CHAT else {"prompt": text}
    request = a_request({"model": "chat", **prompt}, endpoint=endpoint)
    with pytest.raises(ContextTooLong, match=r"2048 .* is 50\d{5} bytes long.*more than 390\d\d tokens"):
        await fitted(request, {"small": 512, "a": 2048})
    assert NOT_ASKED.asked == 0
    assert (await fitted(request, {"a": 2048, "b": None}, Counter(None))).pools == {"b"}


async def test_up_to_the_longest_tokens_there_are_a_prompt_is_counted() -> None:
    assert (await fitted(long_request(128 * 2000), {"a": 2048}, Counter(2047))).pools == {"a"}


async def test_an_output_limit_that_no_window_holds_is_refused_without_counting() -> None:
    for asked in (2048, 10**12):
        request = a_request(max_completion_tokens=asked)
        with pytest.raises(ContextTooLong, match=rf"2048.*max_completion_tokens asks for {asked}\b"):
            await fitted(request, {"small": 512, "a": 2048})
    assert NOT_ASKED.asked == 0


async def test_a_clamped_request_that_does_not_fit_is_told_what_it_asked_and_what_was_counted() -> None:
    error = await refused(long_request(max_tokens=5000), {"a": 2048}, 2000, on=route(cap=100))
    assert "asks for 5000" in error.message and "100" in error.message and "2100" in error.message
    error = await refused(long_request(max_tokens=5000), {"a": 2048}, 2000, on=route(cap=4096))
    assert "asks for 5000" in error.message and "4096" in error.message and "2048" in error.message


# --- the route's cap ----------------------------------------------------------------------------------------


async def test_more_than_the_cap_is_clamped_and_told() -> None:
    made = await fitted(a_request(max_tokens=5000), {"a": 2048}, on=route(cap=100))
    assert (made.write_output, made.was_clamped) == (100, True)
    assert made.output_for(2048) == 100


async def test_more_than_the_cap_is_refused_where_the_route_says_so() -> None:
    with pytest.raises(BadRequest, match="'max_tokens' is 101; this model allows at most 100") as caught:
        await fitted(a_request(max_tokens=101), {"a": 2048}, on=route(cap=100, clamp=False))
    assert not isinstance(caught.value, ContextTooLong)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("asked", [1, 99, 100])
async def test_up_to_the_cap_the_body_is_left_alone(asked: int) -> None:
    made = await fitted(a_request(max_tokens=asked), {"a": 2048}, on=route(cap=100, clamp=False))
    assert (made.write_output, made.was_clamped) == (None, False)
    assert made.output_for(2048) is None


async def test_a_chat_that_names_no_limit_gets_the_cap() -> None:
    made = await fitted(a_request(), {"a": 2048}, on=route(cap=100))
    assert (made.output_for(2048), made.was_clamped) == (100, False)


async def test_a_cap_that_the_caller_did_not_ask_for_never_makes_a_smaller_engine_refuse() -> None:
    # vLLM answers 400 to max_tokens above its window, while it cuts prompt + max_tokens silently
    made = await fitted(a_request(), {"small": 512, "big": 4096}, on=route(cap=1000))
    assert made.pools == {"small", "big"}
    assert made.output_for(4096) == 1000
    assert made.output_for(512) == 511  # not counted, for its bytes fit: the engine cuts it to what there is room for
    assert made.output_for(None) == 1000


async def test_a_cap_beside_a_counted_prompt_is_what_is_left_of_the_window() -> None:
    made = await fitted(long_request(), {"a": 2048}, Counter(1500), on=route(cap=1000))
    assert made.output_for(2048) == 548


async def test_a_cap_is_no_default_for_completions_whose_own_default_is_sixteen() -> None:
    request = a_request(endpoint=COMPLETIONS)
    made = await fitted(request, {"a": 2048}, on=route(cap=1000))
    assert made.output_for(2048) is None
    assert made.reserve_tokens == made.prompt_tokens + 16
    made = await fitted(request, {"a": 2048}, on=route(cap=5))
    assert made.output_for(2048) == 5
    assert made.reserve_tokens == made.prompt_tokens + 5


async def test_without_cap_and_limit_nothing_is_written() -> None:
    made = await fitted(a_request(), {"a": 2048})
    assert (made.write_output, made.was_clamped, made.output_for(2048)) == (None, False, None)


# --- the reservation ----------------------------------------------------------------------------------------


async def test_every_answer_counts_in_the_reservation() -> None:
    one = await fitted(a_request(max_tokens=100), {"a": 8192})
    three = await fitted(a_request(max_tokens=100, n=3), {"a": 8192})
    assert one.reserve_tokens == one.prompt_tokens + 100
    assert three.reserve_tokens == three.prompt_tokens + 300
    prompts = await fitted(a_request(endpoint=COMPLETIONS, prompt=["a", "b"], n=3, max_tokens=10), {"a": 8192})
    assert prompts.reserve_tokens == prompts.prompt_tokens + 60


async def test_a_clamped_request_reserves_what_it_may_get() -> None:
    made = await fitted(a_request(max_tokens=10**12), {"a": 8192}, on=route(cap=100))
    assert made.reserve_tokens == made.prompt_tokens + 100


async def test_a_chat_without_limit_reserves_no_more_than_there_is_room_for() -> None:
    made = await fitted(a_request(), {"a": 8192})
    assert made.reserve_tokens == made.prompt_tokens + UNKNOWN_OUTPUT
    made = await fitted(long_request(1500), {"a": 1024}, Counter(1000))
    assert made.reserve_tokens == 1024
    made = await fitted(a_request(), {"a": None})
    assert made.reserve_tokens == made.prompt_tokens + UNKNOWN_OUTPUT


async def test_a_counted_prompt_is_reserved_as_counted_and_an_uncounted_one_as_no_more_than_the_window() -> None:
    assert (await fitted(long_request(max_tokens=5), {"a": 2048}, Counter(1234))).prompt_tokens == 1234
    assert (await fitted(long_request(200_000, max_tokens=5), {"a": 2048}, Counter(None))).prompt_tokens == 2048


# --- properties ---------------------------------------------------------------------------------------------

windows_of_pools = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.none() | st.integers(1, 6000), min_size=1, max_size=3
)


@settings(deadline=None)
@given(
    windows=windows_of_pools,
    prompt_bytes=st.integers(0, 5000),
    share=st.floats(0, 1),
    asked=st.none() | st.integers(1, 7000),
    cap=st.none() | st.integers(1, 7000),
    n=st.integers(1, 4),
)
async def test_no_pool_is_named_whose_window_the_exact_count_and_the_output_pass(
    windows: dict[str, int | None], prompt_bytes: int, share: float, asked: int | None, cap: int | None, n: int
) -> None:
    request = long_request(prompt_bytes, max_tokens=asked, n=n)
    tokens = max(-(request.body_bytes // -MAX_TOKEN_BYTES), int(share * request.body_bytes))  # no token holds more
    output = min(asked or 1, cap or 10**9)
    try:
        made = await fit(request, route(cap), Windows(windows), Counter(tokens))
    except ContextTooLong as exc:
        assert all(window is not None and tokens + output > window for window in windows.values())
        assert str(max(w for w in windows.values() if w is not None)) in exc.message
        if asked is not None and "bytes long" not in exc.message:  # so long that nobody counted it
            assert f"asks for {asked}" in exc.message
        return
    assert made.pools
    for pool in made.pools:
        window = windows[pool]
        assert window is None or tokens + output <= window
        written = made.output_for(window)
        assert written is None or (cap is not None and 1 <= written <= cap)
        assert window is None or written is None or written < window or window == 1
    assert made.reserve_tokens >= made.prompt_tokens + n * output


# --- the other paths ----------------------------------------------------------------------------------------


async def test_token_ids_are_counted_as_tokens_and_nobody_is_asked() -> None:
    request = a_request(endpoint=Endpoint.EMBEDDINGS, input=[[1] * 300, [2] * 200])
    made = await fitted(request, {"small": 256, "big": 300})
    assert (made.pools, made.prompt_tokens, made.reserve_tokens) == ({"big"}, 500, 500)
    prompt = a_request(endpoint=COMPLETIONS, prompt=[1] * 300, max_tokens=10)
    assert (await fitted(prompt, {"a": 310})).reserve_tokens == 310
    with pytest.raises(ContextTooLong, match=r"309 tokens; the prompt has 300"):
        await fitted(prompt, {"a": 309})
    assert NOT_ASKED.asked == 0


async def test_each_of_several_prompts_has_room_for_its_own_answer() -> None:
    request = a_request(endpoint=COMPLETIONS, prompt=[[1] * 300, [2] * 300])
    made = await fitted(request, {"a": 512}, on=route(cap=8))
    assert made.output_for(512) == 8
    assert made.reserve_tokens == 600 + 2 * 8


async def test_what_generates_nothing_needs_no_room_for_an_answer_and_reserves_none() -> None:
    text = a_request(endpoint=Endpoint.EMBEDDINGS, input="x" * 2000)
    made = await fitted(text, {"a": 512}, Counter(512), on=route(cap=100))
    assert (made.pools, made.reserve_tokens, made.write_output) == ({"a"}, 512, None)
    with pytest.raises(ContextTooLong, match=r"512 tokens; the prompt has 513\. Shorten") as caught:
        await fitted(text, {"a": 512}, Counter(513))
    assert caught.value.param == "input"


async def test_an_uncounted_prompt_is_estimated_with_a_window_for_each_text() -> None:
    request = a_request(endpoint=Endpoint.EMBEDDINGS, input=["x" * 400] * 100)
    assert 10_000 < (await fitted(request, {"a": 8192})).reserve_tokens < 11_000


@pytest.mark.parametrize("endpoint", [Endpoint.RERANK, Endpoint.RERANK_BARE, Endpoint.RERANK_V2])
async def test_a_query_is_reserved_once_for_each_document(endpoint: Endpoint) -> None:
    body = {"model": "m", "query": "q" * 400, "documents": ["d"] * 50}
    assert 5000 < (await fitted(a_request(body, endpoint=endpoint), {"a": 8192})).reserve_tokens < 5500


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [(Endpoint.RESPONSES, "max_output_tokens"), (Endpoint.MESSAGES, "max_tokens")],
)
async def test_a_response_and_a_message_fit_as_a_chat_does(endpoint: Endpoint, field: str) -> None:
    request = a_request(endpoint=endpoint, **{field: 100})
    assert (await fitted(request, {"a": 512}, Counter(33))).reserve_tokens > 100
    assert (await fitted(request, {"a": 120}, Counter(20))).pools == {"a"}
    with pytest.raises(ContextTooLong, match=field):
        await fitted(request, {"a": 120}, Counter(21))
    cut = await fitted(request, {"a": 512}, Counter(33), on=route(cap=50))
    assert (cut.write_output, cut.was_clamped) == (50, True)


async def test_a_response_that_names_no_limit_gets_the_cap() -> None:
    made = await fitted(a_request(endpoint=Endpoint.RESPONSES), {"a": 2048}, on=route(cap=50))
    assert (made.write_output, made.was_clamped) == (50, False)


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in Endpoint if not endpoint.rules.costs_tokens])
async def test_a_path_that_costs_no_tokens_reserves_none_and_fits_everywhere(endpoint: Endpoint) -> None:
    made = await fitted(a_request(endpoint=endpoint), {"a": 16, "b": None}, on=route(cap=5))
    assert (made.pools, made.prompt_tokens, made.reserve_tokens, made.write_output) == ({"a", "b"}, 0, 0, None)
    assert made.output_for(16) is None
    assert NOT_ASKED.asked == 0


@pytest.mark.parametrize("endpoint", [Endpoint.TOKENIZE, Endpoint.COUNT_TOKENS])
async def test_megabytes_are_not_counted_for_anybody(endpoint: Endpoint) -> None:
    messages = [{"role": "user", "content": "x" * 5_000_000}]
    with pytest.raises(ContextTooLong):
        await fitted(a_request({"model": "m", "messages": messages}, endpoint=endpoint), {"a": 2048})
