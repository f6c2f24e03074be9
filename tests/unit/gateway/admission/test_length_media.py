"""fit: what a prompt with images and the like reserves."""

from __future__ import annotations

import pytest
from fakes.story import a_request

from gateway.admission.length import Fit, fit
from gateway.domain.media import AUDIO_TOKENS, IMAGE_TOKENS, MEDIA_TOKENS, VIDEO_TOKENS, MediaTokens
from gateway.domain.request import InferenceRequest
from gateway.domain.route import PoolOrder, Route, Target
from gateway.domain.windows import Windows


async def fitted(
    request: InferenceRequest, windows: dict[str, int | None], media_tokens: MediaTokens = MEDIA_TOKENS
) -> Fit:
    async def nobody() -> int | None:
        raise AssertionError("media are not counted by an engine")

    route = Route("chat", (), PoolOrder((Target("a"),)), media_tokens=media_tokens)
    return await fit(request, route, Windows(windows), nobody)


@pytest.mark.parametrize("size", [40, 5_000_000])
async def test_an_image_is_reserved_by_rule_however_many_bytes_it_has(size: int) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    text = {"type": "text", "text": "x" * 400}
    request = a_request(messages=[{"role": "user", "content": [text, image, image]}], max_tokens=10)
    made = await fitted(request, {"a": 32_768})
    assert 2 * IMAGE_TOKENS + 100 < made.prompt_tokens < 2 * IMAGE_TOKENS + 200
    assert made.reserve_tokens == made.prompt_tokens + 10
    cheap = MediaTokens(image=256)
    assert 2 * 256 + 100 < (await fitted(request, {"a": 32_768}, cheap)).prompt_tokens < 2 * 256 + 200


async def test_recordings_and_films_have_rules_too() -> None:
    parts = [{"type": "input_audio", "input_audio": {"data": "A" * 9000, "format": "wav"}}, {"type": "video_url"}]
    made = await fitted(a_request(messages=[{"role": "user", "content": parts}]), {"a": None})
    assert AUDIO_TOKENS + VIDEO_TOKENS < made.prompt_tokens < AUDIO_TOKENS + VIDEO_TOKENS + 50


async def test_a_part_of_an_unknown_kind_reserves_its_bytes_and_no_more_than_the_window() -> None:
    request = a_request(messages=[{"role": "user", "content": [{"type": "smell", "smell": "A" * 5000}]}])
    assert 5000 < (await fitted(request, {"a": 32_768})).prompt_tokens < 5100
    assert (await fitted(request, {"a": 2048})).prompt_tokens == 2048
