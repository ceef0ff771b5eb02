"""Which engines this agent can start. A later engine adds its module and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from llmgw.agent.engines.command import CommandEngine
from llmgw.agent.engines.description import Engine
from llmgw.agent.engines.llama_cpp import LlamaCppEngine
from llmgw.agent.engines.xllamacpp import XllamacppEngine

_EVERY: Final[tuple[Engine, ...]] = (CommandEngine(), LlamaCppEngine(), XllamacppEngine())
ENGINES: Final[Mapping[str, Engine]] = MappingProxyType({engine.name: engine for engine in _EVERY})
