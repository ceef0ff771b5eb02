"""Waiting for a hint or for a time, whichever comes first, by the machine's clock."""

from __future__ import annotations

import trio

from llmgw.domain.ports import Machine


async def wait_woken(machine: Machine, wake: trio.Event, until_s: float) -> bool:
    """True when `wake` was set, False when `until_s` has come first."""
    if wake.is_set():
        await trio.lowlevel.checkpoint()
        return True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_alarm, machine, until_s, nursery.cancel_scope)
        await wake.wait()
        nursery.cancel_scope.cancel()
    return wake.is_set()


async def _alarm(machine: Machine, until_s: float, scope: trio.CancelScope) -> None:
    await machine.sleep_until(until_s)
    scope.cancel()
