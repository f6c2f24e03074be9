"""The proxied paths as one table: what the gateway has to know of each. A new path is a new row.

Read by edge (decode, errors), admission (length), upstream (body, usage, taps) and the contract tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto


class Prompt(Enum):
    """What kind of prompt a path takes: how `edge/prompts.py` checks it and what a worker can count of it."""

    CHAT = auto()  # OpenAI's messages
    TEXTS = auto()  # a string, strings, token ids or lists of them
    INPUT = auto()  # the same, or a chat
    PAIRS = auto()  # one text against many
    ITEMS = auto()  # a string or a list of items of a conversation
    BLOCKS = auto()  # Anthropic's messages
    CHAT_OR_TEXT = auto()
    IDS = auto()  # token ids
    MEDIA = auto()  # a file


class ErrorShape(Enum):
    OPENAI = auto()
    ANTHROPIC = auto()


class StreamEnd(Enum):
    """The sign that a stream is whole."""

    NONE = auto()  # the path does not stream
    DONE = auto()  # data: [DONE]
    RESPONSE = auto()  # the event response.completed, response.incomplete or response.failed
    MESSAGE_STOP = auto()  # the event message_stop


class Counts(Enum):
    """Where `usage` of a reply has its numbers."""

    NONE = auto()  # the path costs no tokens, or its engine tells none
    PROMPT = auto()  # prompt_tokens, and completion_tokens where something was generated
    INPUT = auto()  # input_tokens and output_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """One row. Field names are those of the request's top level, or of the form."""

    prompt: Prompt
    prompt_fields: tuple[str, ...]  # in which the prompt stands; the first is blamed where it is missing
    output_fields: tuple[str, ...] = ()  # limits of the output, the one that wins first; (): nothing is generated
    output_default: int | None = None  # the engine's own limit when the caller names none; None: the room there is
    answer_fields: tuple[str, ...] = ()  # multiply the output
    streams: bool = False  # by `stream`
    has_stream_options: bool = False  # `stream_options.include_usage` exists, and is off unless asked for
    end: StreamEnd = StreamEnd.NONE
    usage: Counts = Counts.NONE
    errors: ErrorShape = ErrorShape.OPENAI
    is_form: bool = False  # multipart/form-data instead of JSON
    takes_priority: bool = False  # the engine reads a field `priority`
    takes_defaults: bool = False  # the route's defaults (of sampling) have a meaning here
    is_object: bool = True  # a plain reply is a JSON object; otherwise it may be text
    stateful_fields: tuple[str, ...] = ()  # need an engine that remembers: refused unless null or false
    allowed_values: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of fields that could make the reply no JSON

    @property
    def costs_tokens(self) -> bool:
        """False: the request counts against limits, its size does not."""
        return self.usage is not Counts.NONE


_RERANK = Rules(Prompt.PAIRS, ("query", "documents"), usage=Counts.PROMPT, takes_priority=True)
_SCORE = Rules(
    Prompt.PAIRS,
    # vLLM takes four pairs of names; of each pair the first is the text that is held against the others
    ("text_1", "text_2", "queries", "documents", "queries", "items", "data_1", "data_2"),
    usage=Counts.PROMPT,
    takes_priority=True,
)


class Endpoint(StrEnum):
    """The proxied paths; only these reach a worker, which is asked at the same path."""

    rules: Rules
    raw: bytes  # the path, as it stands in a request line

    def __new__(cls, path: str, rules: Rules) -> Endpoint:
        member = str.__new__(cls, path)
        member._value_ = path
        member.rules = rules
        member.raw = path.encode()
        return member

    CHAT = (
        "/v1/chat/completions",
        Rules(
            Prompt.CHAT,
            ("messages",),
            output_fields=("max_completion_tokens", "max_tokens"),
            answer_fields=("n", "best_of"),
            streams=True,
            has_stream_options=True,
            end=StreamEnd.DONE,
            usage=Counts.PROMPT,
            takes_priority=True,
            takes_defaults=True,
        ),
    )
    COMPLETIONS = (
        "/v1/completions",
        Rules(
            Prompt.TEXTS,
            ("prompt",),
            output_fields=("max_tokens",),
            output_default=16,
            answer_fields=("n", "best_of"),
            streams=True,
            has_stream_options=True,
            end=StreamEnd.DONE,
            usage=Counts.PROMPT,
            takes_priority=True,
            takes_defaults=True,
        ),
    )
    RESPONSES = (
        "/v1/responses",
        Rules(
            Prompt.ITEMS,
            ("input", "instructions"),
            output_fields=("max_output_tokens",),
            streams=True,
            end=StreamEnd.RESPONSE,
            usage=Counts.INPUT,
            takes_priority=True,
            takes_defaults=True,
            stateful_fields=("background", "previous_response_id", "conversation"),
        ),
    )
    MESSAGES = (
        "/v1/messages",
        Rules(
            Prompt.BLOCKS,
            ("messages", "system"),
            output_fields=("max_tokens",),
            streams=True,
            end=StreamEnd.MESSAGE_STOP,
            usage=Counts.INPUT,
            errors=ErrorShape.ANTHROPIC,
            takes_defaults=True,
        ),
    )
    COUNT_TOKENS = (
        "/v1/messages/count_tokens",
        Rules(Prompt.BLOCKS, ("messages", "system"), errors=ErrorShape.ANTHROPIC),
    )
    EMBEDDINGS = (
        "/v1/embeddings",
        Rules(
            Prompt.INPUT,
            ("input", "messages"),
            usage=Counts.PROMPT,
            takes_priority=True,
            allowed_values=(("encoding_format", ("float", "base64")),),
        ),
    )
    RERANK = "/v1/rerank", _RERANK
    RERANK_BARE = "/rerank", _RERANK
    RERANK_V2 = "/v2/rerank", _RERANK
    SCORE = "/v1/score", _SCORE
    SCORE_BARE = "/score", _SCORE
    TOKENIZE = "/tokenize", Rules(Prompt.CHAT_OR_TEXT, ("messages", "prompt"))
    DETOKENIZE = "/detokenize", Rules(Prompt.IDS, ("tokens",))
    TRANSCRIPTIONS = (
        "/v1/audio/transcriptions",
        Rules(Prompt.MEDIA, ("file",), streams=True, end=StreamEnd.DONE, is_form=True, is_object=False),
    )
