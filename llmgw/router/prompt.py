"""What a request's body says to a model: its texts and its images, in every API family. Pure, one pass, no recursion of ours.

Every text counts that is not known to stay with the engine: a member that is new, or was forgotten here, is judged rather than
passed over. Of an object that names a member twice, both are read, because engines differ in which of them they take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

from llmgw.domain.errors import Invalid

# Members of the top level that no model reads.
_NOT_READ: Final = frozenset(
    {
        "background", "encoding_format", "include", "metadata", "modalities", "model", "previous_response_id", "prompt_cache_key",
        "quality", "reasoning", "reasoning_effort", "request_id", "safety_identifier", "service_tier", "size", "stop",
        "stop_sequences", "stream_options", "thinking", "tool_choice", "truncate", "truncation", "user", "voice",
    }
)  # fmt: skip
# Below these an object is the client's own: its keys are read by models too, and nothing in it is a part of a message.
_OWN: Final = frozenset(
    {
        "arguments", "chat_template_kwargs", "functions", "guided_json", "input", "input_schema", "json_schema", "parameters",
        "response_format", "schema", "structured_outputs", "tools",
    }
)  # fmt: skip
# Words of the APIs and of JSON Schema in there: a rule on "function" is not about every request that has tools.
_SCHEMA_KEYS: Final = frozenset(
    {
        "$defs", "$ref", "additionalProperties", "anyOf", "default", "description", "enum", "function", "input_schema", "items",
        "json_schema", "name", "parameters", "properties", "required", "schema", "strict", "title", "type",
    }
)  # fmt: skip
_FIXED: Final = {
    "role": frozenset({"assistant", "developer", "function", "system", "tool", "user"}),
    "type": frozenset(
        {
            "array", "audio_url", "base64", "boolean", "document", "file", "function", "function_call", "function_call_output", "image",
            "image_url", "input_audio", "input_file", "input_image", "input_text", "integer", "json_object", "json_schema", "message",
            "null", "number", "object", "output_text", "reasoning", "refusal", "string", "text", "thinking", "tool_result", "tool_use",
            "url", "video_url",
        }
    ),
}  # fmt: skip
_CONTENT: Final = frozenset({"content", "system", "output"})  # their parts are put together, whether texts or objects with one
_TEXT: Final = "text"
_IMAGE_TYPES: Final = frozenset({"image", "image_url", "input_image", "image_pil", "image_embeds", "computer_screenshot"})
_IMAGE_KEY: Final = "image_url"
_URLS: Final = frozenset({"url", "image_url", "audio_url", "video_url", "file_url", "file_data"})
_BASE64_HEAD: Final = 256  # characters in which a data URL says that it is base64
_BASE64_OF: Final = {"data": frozenset({"source", "input_audio"}), "file_data": frozenset({"file", "content"})}  # and what it stands in
_ARGUMENTS: Final = "arguments"  # JSON in a text, which engines unpack for their templates
_NUMBERED: Final = frozenset({"prompt", "input", "input_ids", "prompt_token_ids"})
_EMBEDDED: Final = "prompt_embeds"


class _Object(list[tuple[str, Any]]):
    """An object as it stands in the body, with names that are there twice."""

    __slots__ = ()


@attrs.frozen
class Prompt:
    """`texts` and `images` (how many) by the top level's member that holds them; `numbered` is a member that holds a prompt as
    numbers, "" without one."""

    texts: Mapping[str, list[str]]
    images: Mapping[str, int]
    numbered: str = ""


def read_prompt(body: bytes) -> Prompt:
    """Of a body that `read_body` has taken. Raises Invalid (400) where it is nested more deeply than it can be read."""
    texts: dict[str, list[str]] = {}
    images: dict[str, int] = {}
    numbered = ""
    for name, value in plain_members(body):
        if name in _NOT_READ:
            continue
        if (name in _NUMBERED and _has_numbers(value)) or (name == _EMBEDDED and value is not None):
            numbered = name
        found = texts.setdefault(name, [])
        count = _gather(name, value, found)
        if count:
            images[name] = images.get(name, 0) + count
        if not found:
            del texts[name]
    return Prompt(texts, images, numbered)


def plain_members(body: bytes) -> list[tuple[str, Any]]:
    """The top level's members in their order, also those that are there twice. Numbers are floats, objects lists of pairs."""
    try:
        found = json.loads(body, object_pairs_hook=_Object, parse_int=float)
    except (ValueError, RecursionError):  # it was read once, by a reader of about the same depth
        raise Invalid("the request body is nested too deeply", code="invalid_json") from None
    assert isinstance(found, _Object)  # read_body takes nothing else
    return found


def _has_numbers(value: Any) -> bool:
    if type(value) is not list:
        return False
    return any(type(item) is float or (type(item) is list and any(type(inner) is float for inner in item)) for item in value)


def _gather(name: str, value: Any, texts: list[str]) -> int:
    """Adds every text below `value` to `texts`; the number of images. `name` is the member it stands under."""
    images = 0
    stack: list[tuple[str, Any, bool]] = [(name, value, name in _OWN and name != "input")]
    while stack:
        under, value, own = stack.pop()
        kind = type(value)
        if kind is str:
            texts.append(value)
        elif kind is list:
            if under in _CONTENT and not own:
                _add_split(value, texts)
            stack.extend((under, item, own) for item in value if type(item) in _HOLDS_TEXT)
        elif kind is _Object:
            if not own:
                images += _images(value)
            for key, item in value:
                if own and key not in _SCHEMA_KEYS:
                    texts.append(key)
                if type(item) is not str:
                    stack.append((key, item, own or key in _OWN))
                elif item not in _FIXED.get(key, _NOTHING) and (own or not _is_base64(under, key, item)):
                    texts.append(item)
                    if key == _ARGUMENTS and "\\" in item:
                        stack.append((key, _unpacked(item), True))
    return images


_HOLDS_TEXT: Final = frozenset({str, list, _Object})
_NOTHING: Final[frozenset[str]] = frozenset()


def _add_split(parts: list[Any], texts: list[str]) -> None:
    """Engines put the parts of a content together, some with a line break between them and some with nothing: a word that is
    split over two parts is one for the model."""
    found = []
    for part in parts:
        if type(part) is str:
            found.append(part)
        elif type(part) is _Object:
            found += [item for key, item in part if key == _TEXT and type(item) is str]
    if len(found) > 1:
        texts.append("".join(found))
        texts.append("\n".join(found))


def _unpacked(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object, parse_int=float)
    except (ValueError, RecursionError):
        return None


def _images(part: _Object) -> int:
    keys = sum(key == _IMAGE_KEY and item is not None for key, item in part)
    return keys or int(any(key == "type" and type(item) is str and item in _IMAGE_TYPES for key, item in part))


def _is_base64(under: str, key: str, text: str) -> bool:
    """Is it data in base64, such as an image? No word is looked for in there."""
    if key in _URLS and text.startswith("data:"):
        return ";base64," in text[:_BASE64_HEAD]
    return under in _BASE64_OF.get(key, _NOTHING)
