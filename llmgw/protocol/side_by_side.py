"""The halves of a session, at either end of it: they end together, with the error of whichever ended first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from llmgw.domain.errors import LlmgwError


async def until_one_ends(*halves: Callable[[], Awaitable[None]]) -> None:
    """Runs all of them until one returns or fails; raises the first LlmgwError as itself, never in a group.

    `except*` would not do: what it raises comes in a group again where a cancel has come at the same time.
    """
    ends: list[LlmgwError] = []
    async with trio.open_nursery() as nursery:

        async def run(half: Callable[[], Awaitable[None]]) -> None:
            try:
                await half()
            except LlmgwError as err:
                ends.append(err)
            nursery.cancel_scope.cancel()

        for half in halves:
            nursery.start_soon(run, half)
    if ends:
        raise ends[0]
