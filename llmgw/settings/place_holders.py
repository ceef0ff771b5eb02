"""Place-holders of the engine `command`: which words in braces are filled in, and what only looks like one. For warnings.

No faults: braces may also be meant as they stand, and there is no other way to write them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Final

from llmgw.domain.model import PLACE_HOLDERS, ModelSpec, Profile
from llmgw.settings.decode import join, short
from llmgw.settings.schema import Settings

# `${HOME}` and `%{x}` are a shell's or a log format's, `{{x}}` is a template's: nobody means one of ours by them.
_LIKE_ONE: Final = re.compile(r"(?<![$%{])\{([A-Za-z_][A-Za-z0-9_-]*)\}(?!\})")
_NEAREST_SHARE: Final = 0.6  # as for keys (settings.decode)
_FILLED_IN: Final = "command"  # the engine whose `command` and `args` are


def warnings_of(models: Iterable[ModelSpec]) -> list[str]:
    """A line for each word in braces that reaches a program as it stands and looks as if that were not meant."""
    return [
        f"model {model.name!r}, profile {profile.name!r}: {told}"
        for model in models
        for profile in model.profiles
        for told in dict.fromkeys(_of_profile(profile))
    ]


def warnings_of_engines(settings: Settings) -> list[str]:
    """As `warnings_of`, for `[engines.<name>] command`, in which nothing is filled in."""
    return [
        f"{join('engines', name)}.command: {told}"
        for name, engine in settings.engines.items()
        for told in dict.fromkeys(_not_here(engine.command))
    ]


def _of_profile(profile: Profile) -> Iterator[str]:
    elsewhere: dict[str, tuple[str, ...]] = {
        "ready_path": (profile.ready_path,),
        "checkpoint": (profile.checkpoint,),
        "url": (profile.url,),
    }
    elsewhere.update({join("env", name): (value,) for name, value in profile.env.items()})
    for key, words in (("command", profile.command), ("args", profile.args)):
        if profile.engine == _FILLED_IN:
            yield from (f"{key}: {told}" for told in _unknown(words))
        else:
            elsewhere[key] = words
    for key, words in elsewhere.items():
        yield from (f"{key}: {told}" for told in _not_here(words))


def _unknown(words: Iterable[str]) -> Iterator[str]:
    for name in _names(words):
        if name in PLACE_HOLDERS:
            continue
        near = difflib.get_close_matches(name.lower(), PLACE_HOLDERS, n=1, cutoff=_NEAREST_SHARE)
        known = " ".join(f"{{{holder}}}" for holder in PLACE_HOLDERS)
        hint = f"did you mean {{{near[0]}}}?" if near else f"known: {known}"
        yield f"{{{short(name, 40)}}} is no place-holder and stays as it is; {hint}"


def _not_here(words: Iterable[str]) -> Iterator[str]:
    for name in _names(words):
        if name in PLACE_HOLDERS:
            yield f'{{{name}}} stays as it is: place-holders are filled in only in command and args of engine "{_FILLED_IN}"'


def _names(words: Iterable[str]) -> Iterator[str]:
    return (match[1] for word in words for match in _LIKE_ONE.finditer(word))
