"""Times as people give them: RFC 3339, or a span from the server's own now. This machine's clock may differ, and is not asked."""

from __future__ import annotations

import datetime
import re
from email.utils import parsedate_to_datetime
from typing import Final

import click

from llmgw.cli.ctl.client import Answer
from llmgw.cli.ctl.output import Ctl
from llmgw.domain.errors import Invalid

_SPAN: Final = re.compile(r"\+?(\d{1,40})(s|m|min|h|d)\Z", re.ASCII)
_SPAN_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def time_after(ctl: Ctl, option: str, text: str, noun: str) -> str:
    """What `option` says, as RFC 3339; a span counts forward. `noun` is what the server is asked for, to tell its time."""
    return _time(ctl, option, text, noun, 1)


def time_before(ctl: Ctl, option: str, text: str, noun: str) -> str:
    """As `time_after`; a span counts back."""
    return _time(ctl, option, text, noun, -1)


def _time(ctl: Ctl, option: str, text: str, noun: str, direction: int) -> str:
    from llmgw.settings.objects import parse_time

    span = _SPAN.match(text)
    if span is None:
        try:
            parse_time(text)
        except ValueError as err:
            raise click.UsageError(f"{option}: {err}; or a span like 90m, 2h, 3d") from err
        return text
    seconds = direction * int(span.group(1)) * _SPAN_S[span.group(2)]
    try:
        moment = _server_time(ctl.client.get(noun)) + datetime.timedelta(seconds=seconds)
    except OverflowError as err:
        raise click.UsageError(f"{option}: the span {text} is too large: no date is so far from now") from err
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _server_time(answer: Answer) -> datetime.datetime:
    try:
        return parsedate_to_datetime(answer.headers["date"]).astimezone(datetime.UTC)
    except (KeyError, ValueError, TypeError) as err:
        raise Invalid("the server does not tell its time: give it as RFC 3339") from err
