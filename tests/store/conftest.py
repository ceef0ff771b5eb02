"""The store of most tests: in memory. What is about a file opens its own."""

from __future__ import annotations

import pytest

from llmgw.store.connection import MEMORY, FileStore
from tests.store.runners import inline


@pytest.fixture
async def store():
    opened = await FileStore.open(MEMORY, inline)
    yield opened
    opened.close()
