"""A leader as a process of its own, for tests that kill everything at once.

`child PID`, then `ack KEY` for each acknowledged write, go to standard output between the lines of its log.

python -m tests.replication.leader BUCKET PREFIX ENDPOINT REGION CREDENTIALS DATA_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from llmgw.replication.programs import find
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.machine import RealMachine
from tests.replication.epochs import Lease, leading


async def main(place: ObjectPlace, data_dir: Path) -> None:
    async with leading(RealMachine(), place, Lease(), data_dir, find()) as one:
        print(f"child {one.litestream.child_pid}", flush=True)
        while True:
            print(f"ack {await one.acknowledge()}", flush=True)


if __name__ == "__main__":
    trio.run(main, ObjectPlace(*sys.argv[1:6]), Path(sys.argv[6]))
