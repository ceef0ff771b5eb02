"""How texts are compared where case and dress do not matter: `fold` of both, then plain comparison. Pure, one pass, no back-tracking.

Unicode's own compatibility form is left out on purpose: it makes one character into eighteen, and sorts long runs of combining
marks in quadratic time, and the text is a stranger's.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from typing import Final

# Nobody sees them, and a model reads over them: soft hyphens, joiners, marks of direction, variation selectors, fillers.
_INVISIBLE: Final = (
    (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F),
    (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xE0100, 0xE01EF),
)  # fmt: skip
# Letters and digits in another dress: letter-like signs, circles, full width, mathematical alphabets. Not the punctuation of full
# width, which is in every Chinese text and in no word.
_DRESSED: Final = (
    (0x2100, 0x214F), (0x24B6, 0x24E9), (0xFF10, 0xFF19), (0xFF21, 0xFF3A), (0xFF41, 0xFF5A), (0x1D400, 0x1D7FF),
)  # fmt: skip
_BLANKS: Final = (
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)  # white space beyond ASCII
_ASCII_BLANKS: Final = "\t\n\v\f\r\x1c\x1d\x1e\x1f"
_TAGS: Final = (0xE0000, 0xE007F)  # invisible too, and yet models read them as the ASCII that they copy


def _pairs() -> Iterator[tuple[int, str | None]]:
    for low, high in _INVISIBLE:
        for code in range(low, high + 1):
            yield code, None
    for low, high in _BLANKS:
        for code in range(low, high + 1):
            yield code, " "
    for low, high in _DRESSED:
        for code in range(low, high + 1):
            plain = unicodedata.normalize("NFKC", chr(code))
            if plain != chr(code) and len(plain) == 1:
                yield code, plain
    for code in range(_TAGS[0], _TAGS[1] + 1):
        plain = chr(code - _TAGS[0])
        yield code, plain if plain.isprintable() else None


@functools.cache
def _plain() -> dict[int, str | None]:
    return dict(_pairs())  # made when it is first needed: 5 ms, and most processes never compare a text


@functools.cache
def _odd() -> re.Pattern[str]:
    return re.compile("[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in (*_INVISIBLE, *_BLANKS, *_DRESSED, _TAGS)) + "]+")


def _undressed(found: re.Match[str]) -> str:
    return found[0].translate(_plain())


def fold(text: str) -> str:
    """`text` without its case, without what nobody sees, white space as single blanks, none at the ends.

    Takes time in proportion to `text`; the result has at most three times as many characters. Look-alike letters of other
    scripts stay what they are.
    """
    if text.isascii():
        text = text.lower()
    else:
        text = _odd().sub(_undressed, text).casefold()
    for blank in _ASCII_BLANKS:
        text = text.replace(blank, " ")
    while "  " in text:  # each turn halves the runs; splitting and joining takes ten times as long
        text = text.replace("  ", " ")
    return text.strip(" ")
