"""What a client names and what may serve it: models, their profiles, and the catalog that holds them.

A `Catalog` is immutable and validated by its only constructor. Which catalog is current is `control.catalog`'s to know.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.domain.errors import Fault, Invalid

# `openai` is an address somebody else runs: probed and routed, never started.
# What is filled in in the command line of engine `command`, in braces.
PLACE_HOLDERS: Final = ("host", "port", "checkpoint", "gpus", "model", "names", "api_key_file")
ENGINES: Final = ("xllamacpp", "command", "llama.cpp", "vllm", "sglang", "ollama", "openai")
CPU_BY_DEFAULT: Final = frozenset({"xllamacpp", "command", "openai"})  # gpus = 0 where the profile says nothing
MODEL_NAME_MAX: Final = 256  # bytes of UTF-8; longer ones are refused so that logs and metrics stay bounded
REPLICAS_MAX: Final = 10_000  # chosen: above any fleet we plan for, below what would exhaust the planner


class ModelKind(enum.Enum):
    """Picks the probe. `OTHER` has the readiness path only."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    SCORE = "score"
    AUDIO = "audio"
    IMAGE = "image"
    OTHER = "other"


@attrs.frozen
class ReplicaCounts:
    """How many replicas: `count` now, between `min` and `max`."""

    min: int = 1
    max: int = 1
    count: int = 1

    def faults(self, path: str) -> list[Fault]:
        found = []
        if self.min < 0:
            found.append(Fault(f"{path}.min", f"must be 0 or more, not {self.min}"))
        if self.max > REPLICAS_MAX:
            found.append(Fault(f"{path}.max", f"must be at most {REPLICAS_MAX}, not {self.max}"))
        if self.max < max(self.min, 0):
            reason = f"must be at least min ({self.min}), not {self.max}"
            found.append(Fault(f"{path}.max", reason, (f"{path}.min", f"{path}.max")))
        elif not self.min <= self.count <= self.max:
            reason = f"must be between min and max ({self.min} to {self.max}), not {self.count}"
            found.append(Fault(f"{path}.count", reason, (f"{path}.min", f"{path}.max", f"{path}.count")))
        return found


def _frozen_map(value: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(value))


@attrs.frozen
class Profile:
    """One way to run a model: an engine, a checkpoint and what it needs of a node.

    `gpus` 0 is the CPU device. `memory_mib` 0 is "not said": placement then uses the learned footprint, or an estimate
    from the checkpoint's files. `priority`: lower is preferred. `weight`: a replica's share in routing.
    """

    name: str
    engine: str
    checkpoint: str = ""
    gpus: int = 1
    share_gpu: bool = False
    memory_mib: int = 0
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_map)
    selector: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_map)
    priority: int = 0
    weight: float = 1.0
    command: tuple[str, ...] = ()
    ready_path: str = "/health"
    url: str = ""
    api_key_env: str = ""

    @functools.cached_property
    def _digest(self) -> str:  # cached: the planner asks for every replica at every tick
        run = {
            "engine": self.engine, "checkpoint": self.checkpoint, "gpus": self.gpus, "share_gpu": self.share_gpu,
            "memory_mib": self.memory_mib, "args": self.args, "env": dict(self.env), "command": self.command,
            "ready_path": self.ready_path, "url": self.url, "api_key_env": self.api_key_env,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]

    def digest(self) -> str:
        """Changes when a running replica of this profile would have to be started anew; 16 hex digits.

        Name, selector, priority and weight say where and how much, not what runs, and are left out.
        """
        return self._digest

    def faults(self, path: str) -> list[Fault]:
        found = []

        def of_engine(key: str, reason: str) -> Fault:
            return Fault(f"{path}.{key}", reason, (f"{path}.engine", f"{path}.{key}"))

        if not self.name:
            found.append(Fault(f"{path}.name", "must not be empty", (f"{path}.engine", f"{path}.name")))  # empty: as its engine
        if self.engine not in ENGINES:
            found.append(Fault(f"{path}.engine", f"unknown engine {self.engine!r}; known: {', '.join(ENGINES)}"))
        if self.gpus < 0:
            found.append(Fault(f"{path}.gpus", f"must be 0 or more, not {self.gpus}"))
        if self.memory_mib < 0:
            found.append(Fault(f"{path}.memory_mib", f"must be 0 or more, not {self.memory_mib}"))
        if not (math.isfinite(self.weight) and self.weight >= 0):
            found.append(Fault(f"{path}.weight", f"must be a number of 0 or more, not {self.weight}"))
        if self.engine == "command" and not self.command:
            found.append(of_engine("command", 'engine "command" needs its command line'))
        if self.engine != "command" and self.command:
            found.append(of_engine("command", f'only for engine "command", not {self.engine!r}'))
        if self.engine == "openai" and not self.url.startswith(("http://", "https://")):
            found.append(of_engine("url", 'engine "openai" needs an http:// or https:// address'))
        if self.engine != "openai" and self.url:
            found.append(of_engine("url", f'only for engine "openai", not {self.engine!r}'))
        if not self.ready_path.startswith("/"):
            found.append(Fault(f"{path}.ready_path", f"must begin with /, not {self.ready_path!r}"))
        if self.engine in ("xllamacpp", "llama.cpp", "vllm", "sglang") and not self.checkpoint:
            found.append(of_engine("checkpoint", f"engine {self.engine!r} needs a checkpoint"))
        return found


@attrs.frozen
class ModelSpec:
    """A model: what clients name, and the profiles that may serve it, the preferred first.

    `idle_stop_s` 0: never stopped for idleness. `pool` is a label for listings; routing ignores it.
    """

    name: str
    profiles: tuple[Profile, ...]
    aliases: tuple[str, ...] = ()
    kind: ModelKind = ModelKind.CHAT
    pool: str = "default"
    replicas: ReplicaCounts = ReplicaCounts()
    idle_stop_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a client may use, the model's own first."""
        return (self.name, *self.aliases)

    def profile(self, name: str) -> Profile | None:
        return next((profile for profile in self.profiles if profile.name == name), None)

    def preferred(self, chosen: str | None) -> Profile:
        """The profile to run: the operator's choice where it still exists, else the first by priority."""
        picked = self.profile(chosen) if chosen else None
        return picked or min(self.profiles, key=lambda profile: (profile.priority, self.profiles.index(profile)))

    def faults(self, path: str) -> list[Fault]:
        found = []
        for field, name in (("name", self.name), *(("aliases", alias) for alias in self.aliases)):
            if not name or len(name.encode("utf-8", "surrogatepass")) > MODEL_NAME_MAX or any(c < " " or c == "\x7f" for c in name):
                found.append(
                    Fault(f"{path}.{field}", f"a name of 1 to {MODEL_NAME_MAX} bytes without control characters, not {name[:60]!r}")
                )
        if not (math.isfinite(self.idle_stop_s) and self.idle_stop_s >= 0):
            found.append(Fault(f"{path}.idle_stop_s", f"must be 0 or more, not {self.idle_stop_s}"))
        if not self.profiles:
            found.append(Fault(f"{path}.profile", "a model needs at least one profile"))
        seen: dict[str, str] = {}
        for index, profile in enumerate(self.profiles):
            at = f"{path}.profile[{index}]"
            found += profile.faults(at)
            if (first := seen.setdefault(profile.name, at)) != at:
                named = (f"{at}.name", f"{at}.engine", f"{first}.name", f"{first}.engine")  # without a name: as its engine
                found.append(Fault(f"{at}.name", f"profile {profile.name!r} is named twice", named))
        return found + self.replicas.faults(f"{path}.replicas")


def _by_model_name(models: Iterable[ModelSpec]) -> tuple[ModelSpec, ...]:
    return tuple(sorted(models, key=lambda model: model.name))


@attrs.frozen
class Catalog:
    """Every model, sorted by name. Building one raises `Invalid` with all faults; so a Catalog at hand is a good one.

    `generation` rises with each change; agents and routers echo the one they have reached.
    """

    models: tuple[ModelSpec, ...] = attrs.field(default=(), converter=_by_model_name)
    generation: int = 0
    _by_name: Mapping[str, ModelSpec] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        found: list[Fault] = []
        owner: dict[str, str] = {}
        for index, model in enumerate(self.models):
            found += model.faults(f"model[{index}]" if not model.name else f"model.{model.name}")
            for name in model.names:
                if name in owner:
                    whose = "twice in it" if owner[name] == model.name else f"already by model {owner[name]!r}"
                    found.append(Fault(f"model.{model.name}", f"the name {name!r} is used {whose}"))
                owner.setdefault(name, model.name)
        if found:
            raise Invalid.of("the models are not valid", tuple(found))
        object.__setattr__(self, "_by_name", MappingProxyType({model.name: model for model in self.models}))

    def get(self, name: str) -> ModelSpec | None:
        """The model of that name (aliases are not looked at)."""
        return self._by_name.get(name)

    def with_model(self, model: ModelSpec) -> Catalog:
        """This catalog with `model` added or replaced, one generation on."""
        others = tuple(other for other in self.models if other.name != model.name)
        return Catalog((*others, model), self.generation + 1)

    def without_model(self, name: str) -> Catalog:
        return Catalog(tuple(model for model in self.models if model.name != name), self.generation + 1)
