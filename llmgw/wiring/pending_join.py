"""A join that was begun and has not come to its end: by `llmgw join`, which resumes it, or by a bundle, which `llmgw server` redeems.

The key is on disk before the token is shown to anybody: whoever lets this machine in lets in this key, and it alone may ask again.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.domain.errors import Conflict, Denied, Invalid, NotFound, Overloaded, Unauthenticated, Unavailable
from llmgw.domain.files import unusable
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.identity.bundle import Bundle
from llmgw.identity.join_tokens import JoinToken, hash_secret, parse_token, print_token, token_id
from llmgw.wiring.dialling import identity_folder
from llmgw.wiring.identity_files import CA_FOLDER, mark_joined, save_authority, save_held
from llmgw.wiring.joining import Joined, join
from llmgw.wiring.setup_files import FOLDER_MODE

KEY: Final = "joining-{}.pem"  # in the identity's folder, by the token's id
PREPARED: Final = "joining.json"  # there as well: what a bundle told
AGAIN_S_MIN, AGAIN_S_MAX = 2.0, 5.0  # between two tries of a server that nobody has let in yet
log = structlog.get_logger("llmgw.identity")


@attrs.frozen
class Prepared:
    """A control plane's join that waits for the first start. `addresses` are the new machine's own."""

    token: JoinToken
    addresses: tuple[str, ...]
    ca_pem: str


def pending_key(machine: Machine, folder: Path, token: JoinToken) -> str:
    """The key by which this machine began to join by that token and did not come to the end of it, "" where it did not."""
    path = _key_file(folder, token)
    try:
        return (machine.disk.read(path) or b"").decode()
    except OSError as err:
        raise unusable(err, "the key of a join that was begun", path, "move it away") from err


def keep_key(machine: Machine, folder: Path, token: JoinToken, key: str) -> None:
    _write(machine, _key_file(folder, token), key, "the key of this machine")


def prepare(machine: Machine, folder: Path, bundle: Bundle, addresses: tuple[str, ...], key: str) -> None:
    """For the first start; one that was prepared before is replaced. The key first, so that there is one when the rest is found."""
    keep_key(machine, folder, bundle.token, key)
    told = {"token": print_token(bundle.token), "addresses": list(addresses), "ca": bundle.ca_pem}
    _write(machine, identity_folder(folder) / PREPARED, json.dumps(told), "the join that was prepared")
    for path in identity_folder(folder).glob(KEY.format("*")):
        if path != _key_file(folder, bundle.token):
            path.unlink(missing_ok=True)


def load_prepared(machine: Machine, folder: Path) -> Prepared | None:
    """Raises Invalid, Unavailable, naming the file."""
    path = identity_folder(folder) / PREPARED
    try:
        data = machine.disk.read(path)
    except OSError as err:
        raise unusable(err, "the join that was prepared", path, "move it away") from err
    if data is None:
        return None
    try:
        told = json.loads(data)
        return Prepared(parse_token(told["token"]), tuple(str(one) for one in told["addresses"]), str(told["ca"]))
    except (ValueError, KeyError, TypeError, RecursionError, Invalid) as err:
        raise Invalid(f"{path} is not what `llmgw init --bundle` writes: move it away and run that again", code="bad_identity") from err


def forget(folder: Path, token: JoinToken | None = None) -> None:
    """Nothing is to be resumed any more: of that token, or of any."""
    place = identity_folder(folder)
    for path in place.glob(KEY.format("*")) if token is None else [_key_file(folder, token)]:
        path.unlink(missing_ok=True)
    if token is None:
        (place / PREPARED).unlink(missing_ok=True)


def keep_joined(machine: Machine, folder: Path, joined: Joined) -> None:
    """What this machine was given, in the data directory `folder`. Raises Invalid, Unavailable."""
    if joined.role is MachineRole.SERVER:
        save_authority(machine, folder / CA_FOLDER, joined.ca_key_pem, joined.ca_pem)
        mark_joined(machine, folder, joined.cluster)
    save_held(machine, identity_folder(folder), joined.key_pem, joined.certificate_pem, joined.ca_pem)


async def redeem(machine: Machine, folder: Path, others: str) -> None:
    """At the start of a control plane: where a join was prepared, asks the others until one lets this machine in.

    Nothing else is opened before: identity and the CA's key come with it. Raises Denied where it is not let in, Invalid, Unavailable.
    """
    prepared = await machine.run_sync(lambda: load_prepared(machine, folder))
    if prepared is None:
        return
    token, told = prepared.token, ""
    key = await machine.run_sync(lambda: pending_key(machine, folder, token))
    if not key:
        raise Invalid(f"{_key_file(folder, token)} is missing: run `llmgw init --bundle` again", code="bad_identity")
    while True:
        ask = partial(join, token, token.name, prepared.addresses, others, key, prepared.ca_pem)
        try:
            joined = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)  # the same key may ask again
            break
        except (Unavailable, Overloaded) as err:
            if err.message != told:
                log.warning("this machine has not joined yet; it asks until a control plane lets it in", why=err.message)
            told = err.message
        except (Denied, NotFound, Conflict, Unauthenticated) as err:
            text = f"this machine is not let in as control plane {token.name}: {err.message}"
            raise Denied(f"{text}; `llmgw server add {token.name} --bundle FILE` makes another bundle", code=err.code) from err
        await machine.sleep_until(machine.now_s() + machine.rng.uniform(AGAIN_S_MIN, AGAIN_S_MAX))
    await machine.run_sync(lambda: keep_joined(machine, folder, joined))
    await machine.run_sync(lambda: forget(folder))
    log.info("joined", cluster=joined.cluster, name=joined.name)


def _key_file(folder: Path, token: JoinToken) -> Path:
    return identity_folder(folder) / KEY.format(token_id(hash_secret(token.secret)))


def _write(machine: Machine, path: Path, text: str, what: str) -> None:
    try:
        path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        machine.disk.write(path, text.encode())
    except OSError as err:
        raise unusable(err, what, path) from err
