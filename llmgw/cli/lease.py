"""`llmgw lease release`: lets go of what a process that died here had held, so that another takes over at once.

For `ExecStopPost` of the unit file. Synchronous, no Trio, no server code; ends within RELEASE_DEADLINE_S whatever the disk does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmgw.lease.file import LeaseFile
    from llmgw.lease.object_store import LeaseBucket


@click.group(context_settings={"max_content_width": 120})
def lease() -> None:
    """What a control plane that has ended left of its lease."""


@lease.command()
@click.option(
    "--if-owner-file",
    "owner_file",
    type=click.Path(path_type=Path),
    required=True,
    help="The file in which the control plane wrote down what it held: owner.json in its data directory.",
)
def release(owner_file: Path) -> None:
    """Release the lease of a control plane that died on this machine, and no other's.

    Does nothing while a process uses the file's data directory, when the file is not there, and when the lease is no longer the
    one that the file names. Run it as the control plane's user, after its end.
    """
    click.echo(_within_the_deadline(owner_file))


def _within_the_deadline(owner_file: Path) -> str:
    """In a thread that is left behind if the disk hangs: the unit that calls this must end. Raises what `_release` raises."""
    import threading

    from llmgw.domain.errors import Unavailable
    from llmgw.lease.state import RELEASE_DEADLINE_S

    said: list[str] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            said.append(_release(owner_file))
        except Exception as err:  # handed to the caller's thread, which raises it
            failed.append(err)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(RELEASE_DEADLINE_S)
    if failed:
        raise failed[0]
    if not said:
        raise Unavailable(f"the lease was not released within {RELEASE_DEADLINE_S:g} s: it expires by itself", code="lease_unavailable")
    return said[0]


def _release(owner_file: Path) -> str:
    """What was done, for people. Raises Invalid, Unavailable, OSError."""
    import secrets

    from llmgw.domain.errors import Conflict, Unavailable
    from llmgw.lease.owner_file import parse_owner
    from llmgw.lease.record import RANDOM_BYTES
    from llmgw.lease.rules import release_of
    from llmgw.lease.store import Lost, Unknown
    from llmgw.wiring.data_dir import claim

    if not owner_file.exists():
        return f"nothing to release: there is no {owner_file}"
    try:
        with claim(owner_file.absolute().parent):
            held = parse_owner(owner_file.read_bytes(), owner_file)
            with _records(held.store) as leases:
                if leases is None:
                    return f"nothing to release: the lease's file {held.store or '(none)'} is not there"
                try:
                    record = leases.read(held.role)
                    if record is None or not held.names(record) or record.released:
                        return f"nothing to release: the lease is no longer held by {held.owner} under epoch {held.epoch}"
                    leases.replace(held.role, record, release_of(record, secrets.token_hex(RANDOM_BYTES)))
                except Lost:
                    return f"nothing to release: the lease is no longer held by {held.owner} under epoch {held.epoch}"
                except Unknown as err:
                    raise Unavailable(
                        f"the lease could not be released, it expires by itself: {err.why}", code="lease_unavailable"
                    ) from err
    except Conflict as err:
        return f"nothing released: {err.message}"  # a living process keeps its own lease
    return f"released: the lease of {held.owner} under epoch {held.epoch}"


@contextlib.contextmanager
def _records(store: str) -> Iterator[LeaseBucket | LeaseFile | None]:
    """Where the record is kept; None where that is a file which is not there. Raises Invalid."""
    from llmgw.settings.object_place import ObjectPlace

    if (place := ObjectPlace.parse(store)) is not None:
        from llmgw.lease.object_store import LeaseBucket
        from llmgw.lease.state import RELEASE_DEADLINE_S

        yield LeaseBucket(place, RELEASE_DEADLINE_S)
    elif store and Path(store).exists():
        from llmgw.lease.file import LeaseFile

        with contextlib.closing(LeaseFile(Path(store))) as leases:
            yield leases
    else:
        yield None
