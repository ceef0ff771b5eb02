"""llmgw: any number of GPU machines behind one OpenAI-compatible endpoint, without Kubernetes."""

from __future__ import annotations

from typing import Final

# The build's version; `pyproject.toml` reads it from here, so that it is written once.
__version__: Final = "0.1.0"
