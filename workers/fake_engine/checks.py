"""Turns the body of a completion into a job, or refuses it in vLLM's words; each path's own file calls it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from workers.fake_engine.engine import count_tokens, pieces_of, words
from workers.fake_engine.faults import BadFault, Fault, fault_of
from workers.fake_engine.options import Options
from workers.fake_engine.schema import Body, Refusal, missing, refusal, schema_error

_MAX_N: Final = 16_384
_CHAT_OVERHEAD: Final = 4  # tokens that a chat template adds per message


@dataclass(slots=True)
class Job:
    """One accepted request. `choices` holds each choice's tokens; a request that generates nothing has none."""

    stream: bool
    created: int
    model: str
    prompt_tokens: int
    choices: list[list[str]]
    finish: str
    priority: int
    request_id: str | None
    fault: Fault
    body: Body
    chat: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def job_of(body: Body, options: Options, chat: bool) -> Job:
    """The job that the body of a chat or a completion asks for; raises Refusal."""
    fault = fault_in(body)
    asked = asked_tokens(body, "max_completion_tokens", "max_tokens")
    prompts = _chat_prompt(body, options) if chat else _text_prompts(body)
    check_model(body, options)
    check_sampling(body)
    stream_options = body.get("stream_options") or {}
    if stream_options and not body.get("stream"):
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise refusal(400, message, param="stream_options")
    job = generation(body, options, prompts, asked, fault, unasked=None if chat else 16)
    job.chat = chat
    job.include_usage = bool(stream_options.get("include_usage")) and not fault.no_usage
    job.continuous_usage = bool(stream_options.get("continuous_usage_stats")) and not fault.no_usage
    return job


def generation(
    body: Body,
    options: Options,
    prompts: list[tuple[str, int]],
    asked: int | None,
    fault: Fault,
    *,
    unasked: int | None = None,
    name: str = "max_tokens",
) -> Job:
    """A job that generates from texts with their token counts. Without `asked`, `unasked` or the room is the limit.

    `name` is what the engine calls the limit.
    """
    room = options.max_model_len
    if asked is not None and asked > room:
        trouble = f"cannot be greater than max_model_len={room}. Please request fewer output tokens."
        raise _value(name, asked, trouble, f"{name}={asked}")
    longest = max(tokens for _, tokens in prompts)
    check_length(longest + 1, options)
    limit = min(room - longest, asked or unasked or room)
    own_length = fault.tokens if fault.tokens is not None else options.tokens
    length = limit if body.get("ignore_eos") else min(limit, own_length)
    finish = "length" if length == limit else "stop"
    n = body.get("n") or 1
    if fault.text is not None:
        choices, finish = [pieces_of(fault.text) for _ in range(n * len(prompts))], "stop"
    else:
        choices = [words(text, choice, length) for text, _ in prompts for choice in range(n)]
    if fault.abort:
        choices, finish = [tokens[: max(1, len(tokens) // 2)] for tokens in choices], "abort"
    return Job(
        stream=bool(body.get("stream")),
        created=int(time.time()),
        model=options.names[0],
        prompt_tokens=sum(tokens for _, tokens in prompts),
        choices=choices,
        finish=finish,
        priority=body.get("priority") or 0,
        request_id=body.get("request_id"),
        fault=fault,
        body=body,
    )


def generating_nothing(body: Body, options: Options, prompt_tokens: int) -> Job:
    """A job whose answer is there as soon as its prompt is read."""
    return Job(
        stream=False,
        created=int(time.time()),
        model=options.names[0],
        prompt_tokens=prompt_tokens,
        choices=[],
        finish="stop",
        priority=body.get("priority") or 0,
        request_id=body.get("request_id"),
        fault=fault_in(body),
        body=body,
    )


def fault_in(body: Body) -> Fault:
    """What `x_fake` asks for; raises Refusal."""
    try:
        return fault_of(body.get("x_fake"))
    except (BadFault, TypeError, ValueError) as exc:
        raise refusal(400, str(exc), param="x_fake") from None


def check_length(tokens: int, options: Options) -> None:
    """Raises Refusal when so many tokens are more than the window."""
    room = options.max_model_len
    if tokens > room:
        message = (
            f"This model's maximum context length is {room} tokens. However, your prompt contains at least "
            f"{room + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            f"length of the input prompt. (parameter=input_tokens, value={room + 1})"
        )
        raise refusal(400, message, param="input_tokens")


def check_model(body: Body, options: Options) -> None:
    """A name that is not served is a 404; no name and "" mean the served model."""
    name = body.get("model")
    if name and name not in options.names:
        message = f"The model `{name}` does not exist. Valid aliases: {', '.join(options.names)}."
        raise refusal(404, message, "NotFoundError", "model")


def chat_tokens(body: Body) -> tuple[str, int]:
    """Text and token count of `messages` and `tools`; raises Refusal where a message has no right shape."""
    messages = body.get("messages")
    if "messages" not in body:
        raise missing(body, "messages")
    if not isinstance(messages, list):
        raise schema_error("body.messages", "list_type", "Input should be a valid list", messages)
    if not messages:
        raise refusal(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    text = "".join(_content(at, message) for at, message in enumerate(messages))
    if body.get("tools"):
        text += json.dumps(body["tools"])
    return text, _CHAT_OVERHEAD * (len(messages) + 1) + count(text)


def _content(at: int, message: object) -> str:
    if not isinstance(message, dict) or "role" not in message:
        raise schema_error(f"body.messages.{at}", "missing", "Field required", message)
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    if content is None and message["role"] in ("assistant", "function"):
        return ""
    if not isinstance(content, list):
        raise schema_error(f"body.messages.{at}.content", "string_type", "Input should be a valid string", content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "refusal"):
            raise refusal(400, "this is not a multimodal model")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _chat_prompt(body: Body, options: Options) -> list[tuple[str, int]]:
    prompt = chat_tokens(body)
    if body.get("tools") and body.get("tool_choice", "auto") != "none" and not options.tools:
        raise refusal(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    return [prompt]


def _text_prompts(body: Body) -> list[tuple[str, int]]:
    prompt = body.get("prompt")
    if not prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise refusal(400, message, param="prompt")
    if isinstance(prompt, str):
        return [(prompt, count(prompt))]
    if isinstance(prompt, list):
        if all(isinstance(item, int) for item in prompt):
            return [(str(prompt), len(prompt))]
        if all(isinstance(item, str) for item in prompt):
            return [(item, count(item)) for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [(str(item), len(item)) for item in prompt]
    raise schema_error("body.prompt", "string_type", "Input should be a valid string", prompt)


def count(text: str) -> int:
    """Tokens of a text; raises Refusal where it has half a surrogate pair."""
    try:
        return count_tokens(text)
    except UnicodeEncodeError:
        message = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
        raise refusal(400, message) from None


def asked_tokens(body: Body, *names: str) -> int | None:
    """The output limit that the body asks for: the first name that has one wins."""
    asked: int | None = next((body[name] for name in names if body.get(name) is not None), None)
    if asked is not None and asked < 1:
        raise _value("max_tokens", asked, f"must be at least 1, got {asked}.")
    return asked


def check_sampling(body: Body) -> None:
    temperature, top_p, n = body.get("temperature"), body.get("top_p"), body.get("n")
    if temperature is not None and temperature < 0:
        raise _value("temperature", temperature, f"must be non-negative, got {temperature}.")
    if temperature is not None and temperature > 2:
        raise _value("temperature", temperature, f"must be in [0, 2], got {temperature}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise _value("top_p", top_p, f"must be in (0, 1], got {top_p}.")
    if n is not None and n < 1:
        raise refusal(400, f"n must be at least 1, got {n}.")
    if n is not None and n > _MAX_N:
        way_out = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise refusal(400, f"n must be at most {_MAX_N}, got {n}. {way_out}")


def _value(name: str, value: float, trouble: str, subject: str | None = None) -> Refusal:
    return refusal(400, f"{subject or name} {trouble} (parameter={name}, value={value})", param=name)
