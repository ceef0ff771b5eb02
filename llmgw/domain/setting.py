"""`setting(...)`: an attrs field that carries what the loader, the documentation and the forms must know of it.

The schema is declared once, as attrs classes made of these fields; `settings` reads the metadata back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

import attrs

META: Final = "llmgw.setting"
TABLE: Final = "llmgw.table"  # the metadata of a field that is a table, an array of tables or a table of tables


class Scope(enum.Enum):
    """Whose a key is."""

    MACHINE = "machine"  # one machine's own
    CLUSTER = "cluster"  # the same everywhere: the store's document, or the file where there is no store
    OBJECT = "object"  # a field of a model, key or endpoint table


class Applies(enum.Enum):
    """When a changed value takes effect."""

    LIVE = "live"
    RESTART = "restart"


@attrs.frozen
class SettingMeta:
    """What is known of a key beside its type and default.

    `unit` is empty where the name says it all. `low`/`high` are inclusive; None: no bound. `check` returns a reason
    when a well-typed value is wrong, or None.
    """

    help: str
    scope: Scope
    applies: Applies
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    check: Callable[[Any], str | None] | None = None
    example: Any = None  # what the example file shows where the default would teach nothing


def setting(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    scope: Scope,
    applies: Applies = Applies.RESTART,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    check: Callable[[Any], str | None] | None = None,
    factory: Callable[[], Any] | None = None,
    example: Any = None,
) -> Any:
    """An attrs field with `SettingMeta` in its metadata. Give `default` or `factory`; neither makes the key required."""
    meta = SettingMeta(help, scope, applies, unit, low, high, choices, secret, check, example)
    if factory is not None:
        return attrs.field(factory=factory, metadata={META: meta}, repr=not secret)
    return attrs.field(default=default, metadata={META: meta}, repr=not secret)


def tables(help: str) -> Any:
    """A field that is a `[[list]]` of tables."""
    return attrs.field(factory=tuple, metadata={TABLE: help})


def name_fault(value: str) -> str | None:
    """What is wrong with a name that people and logs are to see, or None. The empty one is not at fault."""
    if len(value) > 128 or any(c <= " " or c == "\x7f" for c in value):
        return f"expected a name of at most 128 characters without spaces, not {value!r}"
    return None


def needed_name_fault(value: str) -> str | None:
    """The same, where there must be one."""
    return name_fault(value) if value else "must not be empty"
