"""What images, recordings and films in a prompt cost in tokens, by rule: their bytes tell nothing of it."""

from __future__ import annotations

from dataclasses import dataclass

# What an engine makes of one part depends on the model and the picture. Read in vLLM 0.32: Pixtral one token for
# 16 x 16 pixels and a mark for each row; in its issue 20123: Qwen2-VL up to 16,384. As their makers are known to say,
# not looked up again: Qwen2-VL one for 28 x 28, 256 to 1,280 advised; LLaVA-1.5 576 and LLaVA-NeXT up to 2,928 whatever
# it shows; Gemma 3 256.
IMAGE_TOKENS = 1280
AUDIO_TOKENS = 750  # 30 s, all that Qwen2-Audio hears of a recording: 25 a second
VIDEO_TOKENS = 6272  # LLaVA-OneVision: 196 for each of the 32 frames that vLLM takes of a film


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens of one part of each kind; a pool may say its own (`image_tokens` …)."""

    image: int = IMAGE_TOKENS
    audio: int = AUDIO_TOKENS
    video: int = VIDEO_TOKENS


MEDIA_TOKENS = MediaTokens()


@dataclass(frozen=True, slots=True)
class Media:
    """The parts of a prompt that are no text."""

    images: int = 0
    audios: int = 0
    videos: int = 0
    body_bytes: int = 0  # of all parts, as they stand in the body
    unknown_bytes: int = 0  # of those among them whose kind is not known here

    def __add__(self, other: Media) -> Media:
        return Media(
            self.images + other.images,
            self.audios + other.audios,
            self.videos + other.videos,
            self.body_bytes + other.body_bytes,
            self.unknown_bytes + other.unknown_bytes,
        )

    def tokens(self, each: MediaTokens) -> int:
        """What they are taken to cost. A part of an unknown kind costs its bytes: if it is text, it cannot be more."""
        return self.images * each.image + self.audios * each.audio + self.videos * each.video + self.unknown_bytes
