"""Carries an order of steps out, as `rules` gives it: who does the steps picks none by hand.

await carry_out(rules.RULES.take_over, {Step.RESTORE: …, Step.REPLICATE: …, Step.UPLOAD: …, Step.PUBLISH: …}, done={Step.ACQUIRE})
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from llmgw.domain.errors import Broken
from llmgw.replication.rules import Step

Doing = Mapping[Step, Callable[[], Awaitable[None]]]


async def carry_out(order: Sequence[Step], doing: Doing, done: Collection[Step] = ()) -> None:
    """One after the other; what a step raises ends it. `done`: those before the first that is to be done, which have been.

    Raises Broken, before anything is done, when a step of the order has nobody who does it, or one was done before its turn.
    """
    left = list(order)
    while left and left[0] in done:
        del left[0]
    wrong = [step for step in left if step not in doing or step in done]
    if wrong:
        raise Broken(f"this step cannot be done in its turn: {wrong[0].value}")
    for step in left:
        await doing[step]()
