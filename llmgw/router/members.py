"""The members of a JSON body, a client's or an engine's, that somebody looks at, and what picks them out. All else is skipped.

By itself because of msgspec: a module with a Struct is not compiled, and those that use these are.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec


class OutputMembers(msgspec.Struct, kw_only=True):
    """What the API families call the number of tokens that are asked for; the last is llama.cpp's own, which it takes everywhere."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n_predict: Any = None


OUTPUT_TOKENS: Final = OutputMembers.__struct_fields__


class AskedMembers(OutputMembers, kw_only=True):
    """What routing looks at. The last three are where long texts stand."""

    model: Any = msgspec.UNSET
    stream: Any = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class LimitedMembers(OutputMembers, kw_only=True):
    """What the guard's limits are about."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


COUNT_MAX: Final = 2**40  # tokens of one answer; no engine gets there, and sums of very many stay within 64 bits
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


class DetailsMembers(msgspec.Struct):
    cached_tokens: Count | None = None


class UsageMembers(msgspec.Struct):
    """Usage as OpenAI's engines tell it with a plain answer; anything else is read field by field."""

    prompt_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: DetailsMembers | None = None
    input_tokens_details: None = None


class PlainMembers(msgspec.Struct):
    """A plain answer."""

    usage: UsageMembers


class SaidMembers(msgspec.Struct):
    """What of an answer or an event tells usage, in any family."""

    usage: Any = None
    choices: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None
    response: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


PLAIN: Final = msgspec.json.Decoder(PlainMembers)
SAID: Final = msgspec.json.Decoder(SaidMembers)
ASKED: Final = msgspec.json.Decoder(AskedMembers)
LIMITED: Final = msgspec.json.Decoder(LimitedMembers)
