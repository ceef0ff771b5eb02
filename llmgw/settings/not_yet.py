"""What files may say already and this build does not do: told whenever it is asked for, never passed over in silence.

A line leaves this list in the change that brings it into force.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llmgw.domain.model import ModelSpec
from llmgw.domain.policy import GuardRule
from llmgw.settings.schema import Settings

# Paths, or their beginnings up to a dot.
KEYS: Final = (
    "notify.",
    "reconcile.brake.",
    "route.affinity",
    "route.health_interval_s",
)


def warnings_of(given: Iterable[str], settings: Settings, models: Iterable[ModelSpec]) -> list[str]:
    """One line for each thing that stands in a file and has no effect in this build. `given` are the paths in the file."""
    asked = [path for path in given if any(path == key or (key.endswith(".") and path.startswith(key)) for key in KEYS)]
    found = [f"{path} has no effect in this build yet" for path in asked if not _is_default(path, settings)]
    found += [f"model {model.name!r}: idle_stop_s has no effect in this build yet" for model in models if model.idle_stop_s]
    for rule in settings.guard.rule:
        found += [f"guard.rule {rule.name!r}: {part} has no effect in this build yet" for part in _later_parts(rule)]
    return found


def _later_parts(rule: GuardRule) -> list[str]:
    """What of a rule the router does not enforce yet; whatever else it says is in force."""
    if rule.on == "completion":
        return ['on = "completion", and so the whole rule,']
    if rule.action == "redact":
        return ['action = "redact", and so the whole rule,']
    return ["match"] if rule.match else []


def _is_default(path: str, settings: Settings) -> bool:
    """Does the file only repeat what holds anyway?"""
    value: object = settings
    default: object = Settings()
    for part in path.split("."):
        if not hasattr(value, part):
            return False
        value, default = getattr(value, part), getattr(default, part)
    return value == default
