"""The words of guard rules, made ready to be found in prompts. Pure; takes time in proportion to the text, and never backtracks.

A word is found whole where it begins and ends with letters or digits of a script that puts blanks between words, and anywhere
where it does not: `secret` is not in `secretary`, `-----BEGIN` is in `x-----BEGIN`, a Chinese word is inside of any sentence.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.domain.fold import fold

# Scripts that write words without blanks between them, or (Hangul) with endings grown on: Thai, Lao, Myanmar, Khmer, kana, Han.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7ff"
    "\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
_RUN: Final = re.compile(rf"[^\W{_UNSPACED}]+")
_ASCII_GAPS: Final = {code: " " for code in range(128) if not chr(code).isalnum() and chr(code) != "_"}
FEW: Final = 32  # words that are looked for one by one: up to here that is quicker than taking the text apart (measured at 1 MB)


@attrs.frozen
class _Phrase:
    """A word that is more than one run of letters: what it looks like folded, and whose it is."""

    text: str
    rules: frozenset[int]

    def stands_in(self, text: str) -> bool:
        """Is it there, with an end of a run wherever one of its own ends in it?"""
        at = text.find(self.text)
        while at >= 0:
            end = at + len(self.text)
            if not (_joined(text, at) or _joined(text, end)):
                return True
            at = text.find(self.text, at + 1)
        return False


def _joined(text: str, at: int) -> bool:
    """Do the characters before and at `at` belong to one run?"""
    return 0 < at < len(text) and _RUN.fullmatch(text, at - 1, at + 1) is not None


@attrs.frozen(eq=False)
class WordFinder:
    """Every word of some rules. `few`: all of them, where they are few. Else `whole` are words that are one run; `by_run` phrases
    by a run in them; `by_head` what has no run in it, by its first two characters (or the only one): so the work grows with the
    text, and hardly with the number of words.
    """

    few: tuple[_Phrase, ...]
    whole: Mapping[str, frozenset[int]]
    by_run: Mapping[str, tuple[_Phrase, ...]]
    by_head: Mapping[str, tuple[_Phrase, ...]]
    foreign_heads: bool  # none of `by_head` begins as an ASCII text could

    @classmethod
    def of(cls, words_of: Sequence[Iterable[str]]) -> WordFinder:
        """The finder of rules, each by its words; rules are told by their place in `words_of`."""
        rules_of: dict[str, set[int]] = {}
        for rule, words in enumerate(words_of):
            for word in words:
                for form in ("NFC", "NFD"):  # an accent may be part of its letter or a character of its own
                    folded = fold(unicodedata.normalize(form, word))
                    if folded:
                        rules_of.setdefault(folded, set()).add(rule)
        whole: dict[str, frozenset[int]] = {}
        by_run: dict[str, list[_Phrase]] = {}
        by_head: dict[str, list[_Phrase]] = {}
        if len(rules_of) <= FEW:
            few = tuple(_Phrase(word, frozenset(rules)) for word, rules in sorted(rules_of.items()))
            return cls(few, MappingProxyType({}), MappingProxyType({}), MappingProxyType({}), True)
        for word, rules in sorted(rules_of.items()):
            runs = _RUN.findall(word)
            if runs == [word]:
                whole[word] = frozenset(rules)
            elif runs:
                by_run.setdefault(max(runs, key=len), []).append(_Phrase(word, frozenset(rules)))
            else:
                by_head.setdefault(word[:2], []).append(_Phrase(word, frozenset(rules)))
        return cls((), MappingProxyType(whole), _frozen(by_run), _frozen(by_head), not any(map(str.isascii, by_head)))

    def find(self, texts: Sequence[str]) -> frozenset[int]:
        """The rules of which a word is in one of `texts`. No word is found across two of them."""
        text = fold("\0".join(texts))
        found: set[int] = set()
        looked_for = list(self.few)
        if self.whole or self.by_run:
            runs = _runs(text)
            for word in runs & self.whole.keys():
                found |= self.whole[word]
            looked_for += [phrase for run in runs & self.by_run.keys() for phrase in self.by_run[run]]
        if self.by_head and not (text.isascii() and self.foreign_heads):
            heads = set(text)
            heads.update(map(operator.add, text, text[1:]))
            looked_for += [phrase for head in heads & self.by_head.keys() for phrase in self.by_head[head]]
        for phrase in looked_for:
            if not phrase.rules <= found and phrase.stands_in(text):
                found |= phrase.rules
        return frozenset(found)


def _runs(text: str) -> set[str]:
    return set(text.translate(_ASCII_GAPS).split()) if text.isascii() else set(_RUN.findall(text))


def _frozen(phrases: dict[str, list[_Phrase]]) -> Mapping[str, tuple[_Phrase, ...]]:
    return MappingProxyType({key: tuple(found) for key, found in phrases.items()})
