"""Runs random schedules of the world for a given time on every core: `python -m tests.property.explore SECONDS [FIRST SEED]`.

Prints how many there were, their seeds, and for each that broke something the line that replays it. Exit 1 when any did.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter

from tests.property.schedules import KINDS, replay_line, run_schedule
from tests.property.world import quiet_logs

CHUNK = 20  # schedules of one piece of work
TELL_S = 60.0


def explore(first: int) -> tuple[int, int, int, list[str]]:
    """(first seed, schedules, terms, what was broken) of one piece: its seeds in every kind."""
    broken: list[str] = []
    count = terms = 0
    with quiet_logs():
        for seed in range(first, first + CHUNK):
            for kind in KINDS.values():
                try:
                    outcome = run_schedule(seed, kind)
                except Exception as err:
                    broken.append(f"{replay_line(seed, kind)}: {type(err).__name__}: {err}")
                    continue
                count += 1
                terms += outcome.terms
                if outcome.wrong:
                    broken.append(f"{replay_line(seed, kind)}: {', '.join(outcome.wrong)}")
    return first, count, terms, broken


def main() -> int:
    seconds, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began_s = told_s = time.monotonic()
    totals: Counter[str] = Counter()
    broken: list[str] = []
    end = first

    def seeds():  # type: ignore[no-untyped-def]
        at = first
        while time.monotonic() - began_s < seconds:
            yield at
            at += CHUNK

    with multiprocessing.Pool() as pool:
        # One piece per worker ahead, so that the end comes in time.
        for at, count, terms, wrong in pool.imap(explore, _slowly(seeds(), pool._processes)):  # type: ignore[attr-defined]
            end = max(end, at + CHUNK)
            totals.update(schedules=count, terms=terms)
            broken += wrong
            _slots.release()
            for line in wrong:
                print(line, flush=True)
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                print(f"{totals['schedules']:,} schedules, {len(broken)} broken", flush=True)
    took_s = time.monotonic() - began_s
    print(
        f"{totals['schedules']:,} schedules of {', '.join(KINDS)} over seeds {first} to {end - 1} in {took_s:.0f} s: "
        f"{totals['terms']:,} terms, {len(broken)} broken"
    )
    return 1 if broken else 0


_slots = multiprocessing.Semaphore(0)


def _slowly(seeds, workers):  # type: ignore[no-untyped-def]
    """The pool's own feeder would take everything at once."""
    for _ in range(2 * workers):
        _slots.release()
    for seed in seeds:
        _slots.acquire()
        yield seed


if __name__ == "__main__":
    sys.exit(main())
