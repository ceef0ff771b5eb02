"""How the news of a replicated store travel between control planes: JSON, what leads to a position in base64."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Final

from llmgw.domain.errors import Unavailable
from llmgw.store.copies import News, Position

BYTES_MAX: Final = 1024 * 1024 * 1024  # of an answer, and of a whole store unpacked
WHOLE_LEVEL: Final = 1  # rows of text: a quarter of the size for little effort


def encode_news(news: News) -> str:
    """News as JSON: what leads to a position, in base64, a whole file compressed as well."""
    whole = None if news.whole is None else base64.b64encode(zlib.compress(news.whole, WHOLE_LEVEL)).decode("ascii")
    changes = [base64.b64encode(one).decode("ascii") for one in news.changes]
    return json.dumps({"epoch": news.position.epoch, "number": news.position.number, "changes": changes, "whole": whole})


def decode_news(body: bytes) -> News:
    """Raises Unavailable for what is none."""
    try:
        value = json.loads(body)
        position = Position(int(value["epoch"]), int(value["number"]))
        changes = tuple(base64.b64decode(one, validate=True) for one in value["changes"])
        whole = None
        if value["whole"] is not None:
            inflate = zlib.decompressobj()
            whole = inflate.decompress(base64.b64decode(value["whole"], validate=True), BYTES_MAX)
            if not inflate.eof:
                raise ValueError("cut, or too large")
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error) as err:
        raise Unavailable("what the leader told of its store cannot be understood", code="peer") from err
    return News(position, changes, whole)
