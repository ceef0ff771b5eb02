"""The parts that need no server: names, words, the configuration, copies, seeds, the control socket's answers."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import Broken, Invalid, Unavailable
from llmgw.replication import control_socket, prefixes
from llmgw.replication.configuration import configuration
from llmgw.replication.control_socket import ControlSocket, Failed
from llmgw.replication.copies import verify
from llmgw.replication.folders import SOCKET, make_folder
from llmgw.replication.orders import carry_out
from llmgw.replication.rules import TAKE_OVER, Step, base_of, out_of_use, uploaded
from llmgw.replication.seeding import copy_seed
from llmgw.replication.troubles import NOTHING_THERE, trouble
from llmgw.settings.object_place import ObjectPlace
from llmgw.store import settings as store_settings
from llmgw.store.connection import FileStore
from tests.lease.records import record
from tests.replication.epochs import keep, kept
from tests.store.runners import inline

TENURE = "a" * 32
PLACE = ObjectPlace("bucket", "a/prefix", "https://s3.example:9000", "eu-central-1")

# --- names and rules

tenures = st.text("0123456789abcdef", min_size=1, max_size=32)
epochs = st.integers(1, 10**15)


@given(epochs, tenures)
def test_a_prefix_is_read_back_as_what_it_was_made_of(epoch: int, tenure: str):
    found = prefixes.parse(prefixes.prefix_of(epoch, tenure))
    assert found == prefixes.EpochName(epoch, tenure)


@pytest.mark.parametrize(
    "text", ["", "e", "e/", "e/1", "e/0-a", "e/01-a", "e/1-", "e/1-A", "e/1-a/b", "f/1-a", "/e/1-a", "e/1-../x", "e/-1-a"]
)
def test_what_is_no_prefix_of_an_epoch_is_none(text: str):
    assert prefixes.parse(text) is None


@pytest.mark.parametrize(("epoch", "tenure"), [(0, "a"), (1, ""), (1, "../x"), (1, "A"), (10**16, "a"), (1, "a" * 65)])
def test_a_name_that_could_not_be_read_back_is_not_made(epoch: int, tenure: str):
    with pytest.raises(Invalid, match="no copy of the store can be called"):
        prefixes.prefix_of(epoch, tenure)


def test_only_equal_numbers_above_zero_are_an_upload():
    assert uploaded(3, 3)
    assert not any(uploaded(*numbers) for numbers in [(0, 0), (3, 5), (5, 3), (1, 0), (0, 1)])  # E10, E11


def test_the_base_is_what_the_record_names():
    assert base_of(None) == base_of(record()) == ""


def test_what_is_in_use_or_newer_or_not_ours_is_not_out_of_use():
    found = ["e/10-a", "e/2-b", "e/9-b", "e/9-a", "e/11-a", "e/x", "lease/control-plane.json", "e/2-a"]
    assert out_of_use(found, "e/10-a", "e/10-a") == ("e/2-a", "e/2-b", "e/9-a", "e/9-b")
    assert out_of_use(found, "e/10-a", "e/9-a") == ("e/2-a", "e/2-b", "e/9-b")
    assert out_of_use(found, "", "") == ()


async def test_an_order_is_carried_out_as_it_is_and_not_begun_where_a_step_has_nobody():
    said: list[Step] = []

    def do(step: Step) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await trio.lowlevel.checkpoint()
            said.append(step)

        return run

    everything = {step: do(step) for step in Step}
    await carry_out(TAKE_OVER, everything, done={Step.ACQUIRE})
    assert said == list(TAKE_OVER[1:])
    said.clear()
    with pytest.raises(Broken, match="this step cannot be done in its turn: win the lease"):
        await carry_out(TAKE_OVER, {step: run for step, run in everything.items() if step is not Step.ACQUIRE})
    with pytest.raises(Broken, match="in its turn: list the published base"):
        await carry_out((Step.ACQUIRE, Step.UPLOAD, Step.RESTORE), everything, done={Step.RESTORE})
    assert not said


# --- words

S3 = "sync: operation error S3: PutObject, https response error StatusCode: {}, RequestID: 1, HostID: {}"


@pytest.mark.parametrize(
    ("text", "why", "needs_repair", "of_credentials"),
    [
        (S3.format(400, "h, api error ExpiredToken: The token has expired"), "the credentials have expired", True, True),
        (S3.format(403, "h, api error InvalidAccessKeyId: no"), "the credentials are not right", True, True),
        (S3.format(403, ", api error AccessDenied: no"), "the credentials do not allow it", True, True),
        (S3.format(403, "h, api error RequestTimeTooSkewed: no"), "this machine's clock and the store's are too far apart", True, False),
        (S3.format(404, "h, NoSuchBucket: The specified bucket"), "there is no such bucket", True, False),
        (S3.format(301, "h, api error PermanentRedirect: no"), "the bucket is in another region than store.s3_region says", True, False),
        (S3.format(503, "h, api error SlowDown: Reduce"), "it asks for fewer requests", False, False),
        (S3.format(500, "h, api error InternalError: x"), "it answered 500 InternalError", False, False),
        (S3.format(0, ", request send failed, Put x: dial tcp 1: connect: connection refused"), "refuses connections", False, False),
        ("write ltx: write /d/meta/ltx/0/1.ltx: no space left on device", "the disk is full", True, False),
        ("database or disk is full (13)", "the disk is full", True, False),
        ("Error: no matching backup files available", NOTHING_THERE, True, False),
        ("context deadline exceeded", "did not answer in time", False, False),
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", "certificate is not trusted", True, False),
        ("something new\nover two lines", "Litestream says: something new over two lines", False, False),
        ("", "Litestream says nothing of why", False, False),
    ],
)  # fmt: skip
def test_what_litestream_says_is_put_in_words(text: str, why: str, needs_repair: bool, of_credentials: bool):
    found = trouble(text)
    assert why in found.why
    assert (found.needs_repair, found.of_credentials, found.absent) == (needs_repair, of_credentials, why == NOTHING_THERE)


@given(st.text())
def test_any_text_of_litestream_is_put_in_one_bounded_line(text: str):
    found = trouble(text)
    assert 0 < len(found.why) < 500
    assert "\n" not in found.why


def test_the_configuration_leaves_nothing_to_the_environment_and_holds_no_secret():
    found = json.loads(configuration(PLACE, "e/7-a", Path("/d/llmgw.db"), Path("/d/meta"), SOCKET))
    (database,) = found["dbs"]
    replica = database["replica"]
    assert (database["path"], database["meta-path"]) == ("/d/llmgw.db", "/d/meta")
    assert (replica["bucket"], replica["path"], replica["endpoint"]) == ("bucket", "a/prefix/e/7-a", "https://s3.example:9000")
    assert (replica["region"], replica["force-path-style"]) == ("eu-central-1", True)
    assert found["levels"][0] == {"interval": "5s"}
    assert found["l0-retention"] == "10m"
    assert found["socket"] == {"enabled": True, "path": SOCKET, "permissions": 0o600}
    assert not [key for key in replica if "key" in key or "secret" in key]


# --- copies and seeds


async def make(path: Path, *keys: str) -> None:
    store = await FileStore.open(path, inline)
    for key in keys:
        await store.write(keep, 1, key)
    store.close()


async def test_a_whole_copy_is_told_what_it_is_of(tmp_path: Path):
    path = tmp_path / "x.db"
    store = await FileStore.open(path, inline)
    await store.write(lambda connection, epoch: connection.execute("UPDATE meta SET cluster_id = 'c1'"), 4)
    document, sha256 = "a = 1\n", store_settings.hashlib.sha256(b"a = 1\n").hexdigest()

    def add(connection: apsw.Connection, epoch: int, sha256: str) -> None:
        connection.execute("INSERT INTO cluster_settings VALUES (1, 0, ?, ?, 'me', '', 0)", (document, sha256))

    await store.write(add, 4, sha256)
    store.close()
    found = verify(path)
    assert (found.cluster_id, found.epoch, found.settings_version, found.settings_sha256) == ("c1", 4, 1, sha256)
    assert found.bytes == path.stat().st_size
    assert os.listdir(tmp_path) == ["x.db"]  # nothing was made beside it


async def test_a_copy_that_is_not_whole_is_refused(tmp_path: Path):
    good = tmp_path / "good.db"
    await make(good, *map(str, range(500)))
    data = good.read_bytes()

    def broken(text: bytes) -> Path:
        path = tmp_path / "broken.db"
        path.write_bytes(text)
        return path

    for wrong in (b"", b"junk" * 2000, data[: len(data) // 2], data[:8192] + bytes(8192) + data[16384:]):
        with pytest.raises(Unavailable, match="fails its check") as raised:
            verify(broken(wrong))
        assert raised.value.code == "copy_damaged"
    with pytest.raises(Unavailable, match="fails its check"):
        verify(tmp_path / "none.db")
    other = tmp_path / "other.db"
    connection = apsw.Connection(str(other))
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(Unavailable, match="it is no database of llmgw"):
        verify(other)


async def test_a_settings_document_that_is_not_the_one_that_was_written_is_found(tmp_path: Path):
    path = tmp_path / "x.db"
    store = await FileStore.open(path, inline)
    await store.write(
        lambda connection, epoch: connection.execute("INSERT INTO cluster_settings VALUES (1, 0, 'a = 1', ?, '', '', 0)", ("0" * 64,)), 1
    )
    store.close()
    with pytest.raises(Unavailable, match="the settings of version 1 are not those that were written"):
        verify(path)


async def test_a_seed_is_taken_over_while_somebody_uses_it(tmp_path: Path):
    path = tmp_path / "llmgw.db"
    store = await FileStore.open(path, inline)
    await store.write(keep, 1, "a")
    folder = make_folder(tmp_path, 1, TENURE)
    try:
        assert copy_seed(path, folder) is not None
        await store.write(keep, 1, "b")
        copied = await FileStore.open(folder.database, inline)
        assert await copied.read(kept) == {"a"}
        copied.close()
        assert await store.read(kept) == {"a", "b"}
    finally:
        store.close()
        folder.close()


async def test_a_seed_that_is_not_there_is_none_and_one_of_another_program_is_refused(tmp_path: Path):
    folder = make_folder(tmp_path, 1, TENURE)
    try:
        assert copy_seed(tmp_path / "none.db", folder) is None
        (tmp_path / "empty.db").write_bytes(b"")
        assert copy_seed(tmp_path / "empty.db", folder) is None
        other = tmp_path / "other.db"
        connection = apsw.Connection(str(other))
        connection.execute("CREATE TABLE t (a)")
        connection.close()
        with pytest.raises(Invalid, match="the database of another program"):
            copy_seed(other, folder)
        (tmp_path / "junk.db").write_bytes(b"junk" * 4000)
        with pytest.raises(Invalid, match="is not a database of llmgw"):
            copy_seed(tmp_path / "junk.db", folder)
        assert not folder.database.exists()
    finally:
        folder.close()


async def test_a_copy_is_never_put_over_one_that_is_there(tmp_path: Path):
    await make(tmp_path / "llmgw.db", "a")
    folder = make_folder(tmp_path, 1, TENURE)
    try:
        copy_seed(tmp_path / "llmgw.db", folder)
        with pytest.raises(Unavailable, match="a copy is never put over it"):
            copy_seed(tmp_path / "llmgw.db", folder)
    finally:
        folder.close()


# --- the control socket

Handler = Callable[[trio.SocketStream], Awaitable[None]]


async def ask(folder: Path, handler: Handler) -> control_socket.Synced | Failed:
    """What a sync comes to with this server."""
    outcome: control_socket.Synced | Failed
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    await listener.bind(str(folder / SOCKET))
    listener.listen()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, handler, [trio.SocketListener(listener)])
            try:
                outcome = await ControlSocket(folder, SOCKET).sync(folder / "x.db", 0.2)
            except Failed as err:
                outcome = err
            nursery.cancel_scope.cancel()
        return outcome
    finally:
        (folder / SOCKET).unlink()


def answers(data: bytes) -> Handler:
    async def handler(stream: trio.SocketStream) -> None:
        asked = await stream.receive_some()
        assert asked.startswith(b"POST /sync HTTP/1.0\r\n")
        await stream.send_all(data)
        await stream.aclose()

    return handler


async def silent(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


OK = b"HTTP/1.0 200 OK\r\n\r\n"


async def test_an_answer_is_two_numbers(tmp_path: Path):
    found = await ask(tmp_path, answers(OK + b'{"status":"no_change","txid":7,"replicated_txid":7}\n'))
    assert found == control_socket.Synced(7, 7)


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (answers(b""), "it cut the connection"),
        (answers(b"junk"), "cannot be understood"),
        (answers(OK + b"[]"), "cannot be understood"),
        (answers(OK + b"{}"), "cannot be understood"),
        (answers(OK + b'{"txid":true,"replicated_txid":1}'), "cannot be understood"),
        (answers(OK + b"x" * 100_000), "too long to be one"),
        (answers(b'HTTP/1.0 500 x\r\n\r\n{"error":"x: no space left on device"}'), "the disk is full"),
        (silent, "the replica did not take it in time"),
    ],
)
async def test_anything_else_is_a_failure_with_its_reason(handler: Handler, why: str, tmp_path: Path):
    found = await ask(tmp_path, handler)
    assert isinstance(found, Failed)
    assert why in found.message


async def test_no_socket_is_a_failure_too(tmp_path: Path):
    with pytest.raises(Failed, match="Litestream does not answer"):
        await ControlSocket(tmp_path, SOCKET).version()
