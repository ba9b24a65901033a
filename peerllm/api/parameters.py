"""OpenAI's request parameters as a GenerateRequest, or an error that names the parameter.

Three kinds: what is served, what is accepted at the one value that changes nothing, and everything else, which is
refused: a client must never believe that a penalty or a tool had an effect.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, Unsupported
from peerllm.protocol.requests import ChatMessage, GenerateRequest, Sampling

_MAX_SHOWN_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    body: GenerateRequest
    model: str | None
    is_streamed: bool
    includes_usage: bool


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    """True and 1, False and 0 are different values here."""
    return lambda value: any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values
    )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _never(value: Any) -> bool:
    return False


Neutral = dict[str, Callable[[Any], bool]]

# Of both routes. null is neutral everywhere. Labels (user, metadata, …) change nothing here whatever they say.
_NEUTRAL: Neutral = {
    "n": _is_one_of(1),
    "frequency_penalty": _is_one_of(0),
    "presence_penalty": _is_one_of(0),
    "repetition_penalty": _is_one_of(1),
    "min_p": _is_one_of(0),
    "logit_bias": _is_one_of({}),
    "user": _is_text,
    "metadata": _is_map,
    "safety_identifier": _is_text,
    "service_tier": _is_one_of("auto", "default"),
}
_NEUTRAL_CHAT: Neutral = {
    "logprobs": _is_one_of(False),
    "top_logprobs": _is_one_of(0),
    "tools": _is_one_of([]),
    "tool_choice": _is_one_of("none", "auto"),
    "parallel_tool_calls": _is_bool,
    "functions": _is_one_of([]),
    "function_call": _is_one_of("none", "auto"),
    "response_format": _is_one_of({"type": "text"}),
    "modalities": _is_one_of(["text"]),
    "store": _is_one_of(False),
    "reasoning_effort": _is_one_of("none"),
    "verbosity": _is_one_of("medium"),
    "prompt_cache_key": _is_text,
    "prompt_cache_retention": _is_text,
    "prompt_cache_options": _is_map,
    "audio": _never,
    "prediction": _never,
    "web_search_options": _never,
    "moderation": _never,
}
_NEUTRAL_COMPLETION: Neutral = {
    "best_of": _is_one_of(1),
    "echo": _is_one_of(False),
    "suffix": _is_one_of(""),
    "logprobs": _is_one_of(False),
}
_SERVED = {
    "model", "stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens",
    "max_completion_tokens", "draft_length",
}  # fmt: skip


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        BadRequest: not JSON, not an object, or text that is not Unicode.
    """
    try:
        body = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The request's body is not valid JSON: {_shown(str(error))}") from None
    if not isinstance(body, dict):
        raise BadRequest("The request's body must be a JSON object.")
    return body


def parse_chat(body: dict[str, Any]) -> ApiRequest:
    """A /v1/chat/completions request. Raises BadRequest and its children, with `param`."""
    _refuse_others(body, _SERVED | {"messages"}, _NEUTRAL | _NEUTRAL_CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a list of at least one message.", param="messages")
    if len(messages) > limits.MAX_LIST_ITEMS:
        raise BadRequest(f"'messages' may have {limits.MAX_LIST_ITEMS} items at most.", param="messages")
    return _request(
        body,
        max_tokens=_max_tokens(body),
        messages=tuple(_message(item, f"messages[{index}]") for index, item in enumerate(messages)),
    )


def parse_completion(body: dict[str, Any]) -> ApiRequest:
    """A /v1/completions request. Raises BadRequest and its children, with `param`."""
    _refuse_others(body, _SERVED | {"prompt"}, _NEUTRAL | _NEUTRAL_COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        raise Unsupported("'prompt' must be one text: several prompts and token ids are not served.", param="prompt")
    if not isinstance(prompt, str):
        raise BadRequest("'prompt' must be text.", param="prompt")
    max_tokens = _max_tokens(body)
    if max_tokens is None:
        max_tokens = limits.DEFAULT_COMPLETION_TOKENS
    return _request(body, max_tokens=max_tokens, prompt=_unicode(prompt, "prompt"))


def _request(body: dict[str, Any], **fields: Any) -> ApiRequest:
    is_streamed = _flag(body, "stream")
    sampling = Sampling(
        temperature=_real(body, "temperature", 0.0, 2.0, default=1.0),
        top_p=_real(body, "top_p", 0.0, 1.0, default=1.0),
        top_k=_whole(body, "top_k", 0, limits.MAX_VOCABULARY) or 0,
        seed=_seed(body),
    )
    draft_length = _whole(body, "draft_length", 0, limits.MAX_DRAFT_LENGTH)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("'model' must be text.", param="model")
    return ApiRequest(
        body=GenerateRequest(stop=_stop(body), sampling=sampling, draft_length=draft_length, **fields),
        model=model,
        is_streamed=is_streamed,
        includes_usage=_includes_usage(body, is_streamed),
    )


def _refuse_others(body: dict[str, Any], served: set[str], neutral: Neutral) -> None:
    for name, value in body.items():
        if value is None or name in served:
            continue
        is_neutral = neutral.get(name)
        if is_neutral is None:
            raise BadRequest(f"The parameter '{_shown(name)}' is not known.", param=_shown(name))
        if not is_neutral(value):
            raise Unsupported(f"The parameter '{name}' is not supported with this value; leave it out.", param=name)


def _message(item: Any, param: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise BadRequest(f"'{param}' must be an object.", param=param)
    role = item.get("role")
    if role in ("tool", "function"):
        raise Unsupported("Tools are not supported.", param=f"{param}.role")
    if role not in ("system", "developer", "user", "assistant"):
        raise BadRequest(f"'{param}.role' must be system, developer, user or assistant.", param=f"{param}.role")
    for name, value in item.items():
        # Null and empty fields come from clients that send back the answers they got.
        if name not in ("role", "content") and value not in (None, [], {}):
            raise Unsupported(f"'{param}.{_shown(name)}' is not supported.", param=f"{param}.{_shown(name)}")
    # Chat templates know OpenAI's newer role by its older name.
    return ChatMessage(
        role="system" if role == "developer" else role, content=_content(item.get("content"), f"{param}.content")
    )


def _content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return _unicode(content, param)
    if not isinstance(content, list) or not content or len(content) > limits.MAX_LIST_ITEMS:
        raise BadRequest(f"'{param}' must be text or a list of text parts.", param=param)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(_unicode(part["text"], f"{param}[{index}]"))
        elif isinstance(kind, str) and kind != "text":
            raise Unsupported(f"Only parts of type 'text' are supported, not '{_shown(kind)}'.", param=param)
        else:
            raise BadRequest(f"'{param}[{index}]' must be a part with 'type' and 'text'.", param=param)
    return "".join(texts)


def _max_tokens(body: dict[str, Any]) -> int | None:
    new = _whole(body, "max_completion_tokens", 1, limits.MAX_CONTEXT)
    old = _whole(body, "max_tokens", 1, limits.MAX_CONTEXT)
    if new is not None and old is not None and new != old:
        raise BadRequest("'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_tokens")
    return old if new is None else new


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > limits.MAX_STOP_STRINGS:
        raise BadRequest(f"'stop' must be a text or a list of at most {limits.MAX_STOP_STRINGS}.", param="stop")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= limits.MAX_STOP_CHARS:
            raise BadRequest(f"Each text in 'stop' must have 1 to {limits.MAX_STOP_CHARS} characters.", param="stop")
    return tuple(_unicode(text, "stop") for text in texts)


def _seed(body: dict[str, Any]) -> int:
    # OpenAI's seeds are signed; the noise's are the same 64 bits without a sign.
    seed = _whole(body, "seed", -(1 << 63), (1 << 64) - 1)
    return secrets.randbits(limits.RANDOM_SEED_BITS) if seed is None else seed % (1 << 64)


def _includes_usage(body: dict[str, Any], is_streamed: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequest("'stream_options' must be an object.", param="stream_options")
    if not is_streamed:
        raise BadRequest("'stream_options' needs 'stream': true.", param="stream_options")
    for name, value in options.items():
        param = f"stream_options.{_shown(name)}"
        if name != "include_usage" and not (name == "include_obfuscation" and value in (None, False)):
            raise Unsupported(f"'{param}' is not supported.", param=param)
    return _flag(options, "include_usage", prefix="stream_options.")


def _flag(body: dict[str, Any], name: str, prefix: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"'{prefix}{name}' must be true or false.", param=prefix + name)
    return bool(value)


def _whole(body: dict[str, Any], name: str, minimum: int, maximum: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not minimum <= value <= maximum:
        raise BadRequest(f"'{name}' must be a whole number from {minimum} to {maximum}.", param=name)
    return value


def _real(body: dict[str, Any], name: str, minimum: float, maximum: float, *, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not minimum <= value <= maximum:
        raise BadRequest(f"'{name}' must be a number from {minimum:g} to {maximum:g}.", param=name)
    return float(value)


def _unicode(text: str, param: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer and no wire takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"'{param}' is not valid Unicode: it has half of a surrogate pair.", param=param) from None
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _shown(text: str) -> str:
    """What a client sent, short and printable enough for an error message."""
    return "".join(character if character.isprintable() else "?" for character in text[:_MAX_SHOWN_NAME])
