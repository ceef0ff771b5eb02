"""Runs one schedule of the world again and prints what happened: `python -m tests.property.replay KIND SEED`."""

from __future__ import annotations

import sys

from llmgw.protocol.messages import Command, CommandResult, Inventory, LeaderHello
from tests.property.schedules import KINDS, run_schedule
from tests.property.world import (
    Acknowledged,
    Arrived,
    Claim,
    Crashed,
    Engine,
    Entry,
    Happened,
    InForce,
    Left,
    Listed,
    Obeys,
    Recorded,
    Restarts,
    Serves,
    Stored,
    quiet_logs,
)

TOLD = (Command, CommandResult, Inventory, LeaderHello)


def line(entry: Entry, roles: dict[str, object]) -> str | None:
    """One line of what is worth a line, or None."""
    match entry:
        case Happened(_, text):
            return f"* {text}"
        case Recorded(_, record):
            return f"record {record.owner} epoch {record.epoch} seq {record.seq} {record.state.value}"
        case Claim(_, plane, role, epoch) if roles.get(plane) != (role, epoch):
            roles[plane] = (role, epoch)
            return f"{plane} is {role.value}, epoch {epoch}"
        case Listed(_, router, stamp, ids):
            kind = "observes" if stamp.from_standby else "lists"
            return f"{router} {kind} {sorted(ids)} under {stamp.token.epoch} {stamp.token.owner}"
        case Engine(_, what, node, replica):
            return f"engine {replica} on {node}: {what}"
        case Acknowledged(_, plane, model, count):
            return f"{plane} acknowledged {model} = {count}"
        case Stored(_, version, parent):
            return f"version {version} is stored, edited from {parent}"
        case InForce(_, plane, live, applied):
            return f"{plane} acts on {live}, runs {applied} as a whole"
        case Obeys(_, router, marker):
            return f"{router} obeys policy {marker}"
        case Serves(_, plane, version):
            return f"{plane} has begun with version {version}"
        case Restarts(_, plane, version, leads):
            return f"{plane} restarts into version {version}{', leading' if leads else ''}"
        case Crashed(_, plane, version):
            return f"{plane} ends by the fault of version {version}"
        case Left(_, sender, receiver, message) | Arrived(_, sender, receiver, message) if isinstance(message, TOLD):
            way = "->" if isinstance(entry, Left) else "=>"
            return f"{sender} {way} {receiver}: {brief(message)}"
    return None


def brief(message: object) -> str:
    match message:
        case Command(token, command_id, _, order):
            return f"{type(order).__name__} {getattr(order, 'replica', None) or order.order.id} ({token.epoch}, {command_id})"
        case CommandResult(command_id, outcome, code):
            return f"result {command_id} {outcome.value} {code}"
        case Inventory():
            return f"inventory under {message.epoch}: {[report.order.id for report in message.replicas]}"
        case LeaderHello(token):
            return f"hello {token.epoch} {token.owner}"
    return type(message).__name__


def main() -> None:
    kind, seed = KINDS[sys.argv[1]], int(sys.argv[2])
    with quiet_logs():
        outcome = run_schedule(seed, kind)
    roles: dict[str, object] = {}
    for entry in outcome.world.history:
        if (text := line(entry, roles)) is not None:
            print(f"{entry.at_s:9.3f}  {text}")
    for name, wrong in outcome.wrong.items():
        print(f"{name}:", *wrong, sep="\n  ")
    print("held" if not outcome.wrong else "BROKEN")


if __name__ == "__main__":
    main()
