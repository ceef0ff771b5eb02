"""The lease on an object store, over HTTP and answer by answer: what each one means, and what an operator reads of it."""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import trio

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.lease.object_leases import ObjectLeases
from llmgw.lease.object_store import LeaseBucket
from llmgw.lease.record import RECORD_BYTES_MAX, ROLE, LeaseRecord, encode
from llmgw.lease.store import Lost, Unknown
from llmgw.lease.timings import LeaseTimings
from llmgw.settings.object_place import ObjectPlace
from tests.lease.machines import ThreadMachine
from tests.lease.places import KEY_ID, SECRET, TOKEN, scripted_place, write_credentials
from tests.lease.records import later, record
from tests.programs import skip, wait_for
from tests.s3_server import Asked, Play, S3Server, answer, content, error, s3_server

KEY = f"a/prefix/lease/{ROLE}.json"
TIMEOUT_S = 30.0  # generous: no answer here is late but those that never come
SHORT_S = 0.3  # for those


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server() as one:
        yield one


@pytest.fixture
def place(server: S3Server, tmp_path: Path) -> ObjectPlace:
    return scripted_place(server.address, tmp_path)


@pytest.fixture
def bucket(place: ObjectPlace) -> LeaseBucket:
    return LeaseBucket(place, TIMEOUT_S)


@pytest.fixture
def written(server: S3Server, bucket: LeaseBucket) -> LeaseRecord:
    """Stands there, and `bucket` knows its version."""
    one = record()
    bucket.replace(ROLE, None, one)
    server.asked.clear()
    return one


def play(server: S3Server, what: bytes | Play, method: str = "") -> None:
    """From now on, to all requests or those of one method."""
    server.script = lambda asked: what if method in ("", asked.method) else None


def methods(server: S3Server) -> list[str]:
    return [asked.method for asked in server.asked]


def everything(err: BaseException | None) -> str:
    """All that a log could print of an error and its causes."""
    texts = []
    while err is not None:
        texts += [str(err), repr(err)]
        err = err.__cause__ or err.__context__
    return "\n".join(texts)


# --- what is asked


def test_a_record_is_made_where_there_is_none_and_replaced_as_it_was_read(server: S3Server, bucket: LeaseBucket):
    one = record()
    bucket.replace(ROLE, None, one)
    bucket.replace(ROLE, one, two := later(one))
    make, change = server.asked
    assert (make.method, make.key, make.body) == ("PUT", KEY, encode(one))
    assert (make.headers.get("if-none-match"), make.headers.get("if-match")) == ("*", None)
    assert (change.method, change.key, change.body) == ("PUT", KEY, encode(two))
    assert change.headers["if-match"] == f'"{hashlib.md5(encode(one)).hexdigest()}"', "as this store makes its ETags"
    assert "if-none-match" not in change.headers


def test_requests_are_signed_for_the_region_with_the_credentials_of_the_file(server: S3Server, place: ObjectPlace, tmp_path: Path):
    write_credentials(tmp_path / "credentials", token=TOKEN)
    LeaseBucket(place, TIMEOUT_S).read(ROLE)
    (asked,) = server.asked
    assert f"Credential={KEY_ID}/" in asked.headers["authorization"]
    assert "/eu-central-1/s3/" in asked.headers["authorization"]
    assert asked.headers["x-amz-security-token"] == TOKEN
    assert SECRET not in str(asked)


def test_what_the_environment_says_of_stores_changes_nothing(server: S3Server, bucket: LeaseBucket, monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "other", "AWS_SESSION_TOKEN": "other", "AWS_SKIP_SIGNATURE": "true",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1", "AWS_REGION": "mars-1",
        "AWS_CONDITIONAL_PUT": "disabled", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true", "AWS_S3_EXPRESS": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    bucket.replace(ROLE, None, record())
    (asked,) = server.asked
    assert (asked.key, asked.headers["if-none-match"]) == (KEY, "*")
    assert f"Credential={KEY_ID}/" in asked.headers["authorization"]
    assert "/eu-central-1/s3/" in asked.headers["authorization"]
    assert "x-amz-security-token" not in asked.headers


def test_the_synchronous_part_loads_no_trio():
    code = "import sys, llmgw.lease.object_store; sys.exit('trio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# --- answers that decide nothing

UNKNOWN: dict[str, tuple[bytes | Play, str, bool]] = {
    "expired": (error(403, "ExpiredToken"), "it answered 403 ExpiredToken: the credentials have expired", True),
    "expired, as 400": (error(400, "ExpiredToken"), "it answered 400 ExpiredToken: the credentials have expired", True),
    "unknown key": (error(403, "InvalidAccessKeyId", AWSAccessKeyId=KEY_ID), "InvalidAccessKeyId: the credentials are not right", True),
    "bad signature": (error(403, "SignatureDoesNotMatch", StringToSign=SECRET), "the credentials are not right", True),
    "401": (error(401, "Unauthorized"), "it answered 401 Unauthorized: the credentials are not right", True),
    "401 of a proxy": (answer(401, b"<html>who are you?</html>"), "it answered 401: the credentials are not right", True),
    "forbidden": (error(403, "AccessDenied"), "AccessDenied: the credentials do not allow it (to read, write, list", True),
    "403 without a word": (answer(403), "it answered 403: the credentials do not allow it", True),
    "no bucket": (error(404, "NoSuchBucket"), "it answered 404 NoSuchBucket: there is no such bucket", True),
    "no store": (answer(404, b"<html>nothing here</html>"), "it answered 404: whatever answers there is no object store", True),
    "404 without a word": (answer(404), "it answered 404: whatever answers there is no object store", True),
    "redirect": (error(301, "PermanentRedirect"), "the bucket is in another region than store.s3_region says", True),
    "wrong region": (
        error(400, "AuthorizationHeaderMalformed", Region="eu-west-1"),
        "AuthorizationHeaderMalformed: the bucket is in another region than store.s3_region says (eu-west-1)",
        True,
    ),
    "skew": (error(403, "RequestTimeTooSkewed"), "this machine's clock and the store's are too far apart", True),
    "conflict": (error(409, "ConditionalRequestConflict"), "it answered 409 ConditionalRequestConflict: another write", False),
    "aborted": (error(409, "OperationAborted"), "it answered 409 OperationAborted: another write was under way", False),
    "429": (answer(429), "it answered 429: it asks for fewer requests", False),
    "slow down": (error(503, "SlowDown"), "it answered 503 SlowDown: it asks for fewer requests", False),
    "503": (answer(503), "it answered 503", False),
    "500": (error(500, "InternalError"), "it answered 500 InternalError", False),
    "502 of a proxy": (answer(502, b"<html>" + b"x" * 100_000), "it answered 502", False),
    "501": (error(501, "NotImplemented"), "it answered 501 NotImplemented: it does not know writes with a condition", True),
    "cut": (Play.CUT, "it cut the connection", False),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "whatever answers there does not speak HTTP", True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_answer_that_is_neither_yes_nor_no_decides_nothing_and_is_told(
    name: str, server: S3Server, bucket: LeaseBucket, place: ObjectPlace, written: LeaseRecord
):
    what, why, fault = UNKNOWN[name]
    play(server, what)
    requests: list[Callable[[], object]] = [
        lambda: bucket.read(ROLE),
        lambda: bucket.replace("another", None, record()),
        lambda: bucket.replace(ROLE, written, later(written)),
        lambda: bucket.remove("another"),
    ]
    for request in requests:
        server.asked.clear()
        refused_write = isinstance(what, bytes) and what.startswith(b"HTTP/1.1 404")  # what stands there was looked at
        with pytest.raises(Unknown) as unknown:
            request()
        assert why in unknown.value.why
        assert unknown.value.why.startswith(f"{place}: ")
        assert unknown.value.fault is fault
        assert SECRET not in unknown.value.why
        assert len(unknown.value.why) < 300
        assert len(server.asked) == (2 if refused_write and server.asked[0].method == "PUT" else 1), "nothing is tried a second time"
    assert [data for _, data in server.bucket.writes] == [encode(written)]


@pytest.mark.parametrize("what", [Play.HANG, Play.LATE])
def test_silence_ends_with_the_time_out_and_decides_nothing(what: Play, server: S3Server, place: ObjectPlace, written: LeaseRecord):
    bucket = LeaseBucket(place, SHORT_S)
    assert bucket.read(ROLE) == written
    play(server, what)
    for request in (lambda: bucket.read(ROLE), lambda: bucket.replace(ROLE, written, later(written)), lambda: bucket.remove("another")):
        with pytest.raises(Unknown, match="it did not answer in time"):
            request()


def test_an_answer_that_ends_in_its_middle_decides_nothing(server: S3Server, bucket: LeaseBucket, written: LeaseRecord):
    play(server, content(encode(written))[:-10])
    with pytest.raises(Unknown, match="it cut the connection in the middle"):
        bucket.read(ROLE)


def say_and_close(listener: socket.socket, data: bytes) -> None:
    one, _ = listener.accept()
    with one:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        while one.recv(4096):
            pass


def test_a_store_that_nobody_answers_for_is_told_apart(place: ObjectPlace):
    with socket.create_server(("127.0.0.1", 0)) as once:
        nobody = f"http://127.0.0.1:{once.getsockname()[1]}"
    long_label = "x" * 64  # no name may have one: it is not even asked for
    for endpoint, why in [
        (nobody, "it refuses connections"),
        (f"http://{long_label}.example:9000", "its name cannot be resolved"),
    ]:
        with pytest.raises(Unknown, match=why):
            LeaseBucket(attrs.evolve(place, endpoint=endpoint), TIMEOUT_S).read(ROLE)


def test_a_store_without_tls_is_told_apart_where_tls_is_asked_for(place: ObjectPlace):
    with socket.create_server(("127.0.0.1", 0)) as plain:
        talker = threading.Thread(target=say_and_close, args=(plain, b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        talker.start()
        with pytest.raises(Unknown, match="whatever answers there does not speak TLS"):
            LeaseBucket(attrs.evolve(place, endpoint=f"https://127.0.0.1:{plain.getsockname()[1]}"), TIMEOUT_S).read(ROLE)
        talker.join(TIMEOUT_S)


def test_a_certificate_of_a_stranger_is_not_trusted(tmp_path: Path, place: ObjectPlace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ALLOW_INVALID_CERTIFICATES", "true")
    openssl = shutil.which("openssl")
    if openssl is None:
        skip("no openssl program to make a certificate with")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = S3Server(tls=context)
    try:
        with pytest.raises(Unknown, match="its certificate is not trusted here"):
            LeaseBucket(attrs.evolve(place, endpoint=server.address), TIMEOUT_S).read(ROLE)
    finally:
        server.close()


def test_a_machine_without_certificates_says_what_to_install(place: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a bare Debian is: the client cannot even be made, also for a store without TLS."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with pytest.raises(Unknown, match=r"this machine has no certificates to trust .*ca-certificates") as unknown:
        LeaseBucket(place, TIMEOUT_S).read(ROLE)
    assert unknown.value.fault


# --- answers that decide


def test_no_such_key_is_the_only_answer_that_says_there_is_no_record(server: S3Server, bucket: LeaseBucket):
    play(server, error(404, "NoSuchKey"))
    assert bucket.read(ROLE) is None


@pytest.mark.parametrize("status", [304, 404, 412])
def test_a_refused_write_is_read_back_and_what_stands_there_decides(
    status: int, server: S3Server, bucket: LeaseBucket, written: LeaseRecord
):
    play(server, error(status, "" if status == 304 else "NoSuchKey"), "PUT")
    with pytest.raises(Lost) as lost:
        bucket.replace(ROLE, written, later(written))
    assert lost.value.current == written
    assert methods(server) == ["PUT", "GET"]
    with pytest.raises(Lost) as lost:
        bucket.replace(ROLE, None, later(written))
    assert lost.value.current == written


def test_a_refused_write_that_cannot_be_read_back_decides_nothing(server: S3Server, bucket: LeaseBucket, written: LeaseRecord):
    server.script = lambda asked: error(412, "PreconditionFailed") if asked.method == "PUT" else error(503, "SlowDown")
    with pytest.raises(Unknown, match="503 SlowDown"):
        bucket.replace(ROLE, written, later(written))


def test_a_write_that_was_repeated_on_its_way_is_found_to_be_ours(server: S3Server, bucket: LeaseBucket, written: LeaseRecord):
    new = later(written)

    def repeat(asked: Asked) -> bytes | None:
        if asked.method != "PUT":
            return None
        server.bucket.restore(KEY, asked.body)
        return error(412, "PreconditionFailed")

    server.script = repeat
    with pytest.raises(Lost) as lost:
        bucket.replace(ROLE, written, new)
    assert lost.value.current == new


def test_a_write_whose_answer_is_lost_is_seen_by_the_next_read_and_may_be_built_on(
    server: S3Server, bucket: LeaseBucket, written: LeaseRecord
):
    new = later(written)
    play(server, Play.LOSE_REPLY, "PUT")
    with pytest.raises(Unknown):
        bucket.replace(ROLE, written, new)
    play(server, Play.CUT, "nothing")
    assert bucket.read(ROLE) == new
    bucket.replace(ROLE, new, later(new))


def test_a_late_write_is_refused_once_somebody_else_has_written(
    server: S3Server, place: ObjectPlace, bucket: LeaseBucket, written: LeaseRecord
):
    hasty = LeaseBucket(place, SHORT_S)
    assert hasty.read(ROLE) == written
    play(server, Play.LATE, "PUT")
    with pytest.raises(Unknown):
        hasty.replace(ROLE, written, later(written))
    play(server, Play.CUT, "nothing")
    bucket.replace(ROLE, written, other := later(written, owner="b-1", epoch=2))
    server.let_late_writes_through()
    assert bucket.read(ROLE) == other


def test_a_late_write_that_nobody_came_before_is_seen(server: S3Server, place: ObjectPlace, bucket: LeaseBucket, written: LeaseRecord):
    hasty, new = LeaseBucket(place, SHORT_S), later(written)
    assert hasty.read(ROLE) == written
    play(server, Play.LATE, "PUT")
    with pytest.raises(Unknown):
        hasty.replace(ROLE, written, new)
    play(server, Play.CUT, "nothing")
    assert bucket.read(ROLE) == written
    server.let_late_writes_through()
    assert bucket.read(ROLE) == new


# --- objects that are no record


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is not JSON"),
        (encode(record())[:100], "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"locked_by": "terraform"}', "cannot be understood"),
        (b"<html>please sign in</html>", "is not JSON"),
        (b"[" * 60_000, "is not JSON"),
        (b" " * (RECORD_BYTES_MAX + 1), f"bytes long; at most {RECORD_BYTES_MAX} are read"),
    ],
)
def test_an_object_that_is_no_record_is_told_by_its_name_and_left_as_it_is(data: bytes, why: str, server: S3Server, bucket: LeaseBucket):
    server.bucket.restore(KEY, data)
    with pytest.raises(Unknown) as unknown:
        bucket.read(ROLE)
    assert f"{ROLE}.json of {bucket.place}" in unknown.value.why
    assert why in unknown.value.why
    assert unknown.value.fault
    with pytest.raises(Unknown):
        bucket.replace(ROLE, None, record())
    assert not server.bucket.writes


def test_an_object_that_is_far_too_large_is_not_fetched(server: S3Server, bucket: LeaseBucket):
    play(server, answer(200, b"x" * 100, ETag='"e"').replace(b"Content-Length: 100", b"Content-Length: 50000000000"))
    with pytest.raises(Unknown, match="is 50000000000 bytes long; at most"):
        bucket.read(ROLE)


def test_a_record_without_a_version_cannot_be_built_on(server: S3Server, bucket: LeaseBucket, written: LeaseRecord):
    play(server, answer(200, encode(written)), "GET")
    with pytest.raises(Unknown, match="came without an ETag"):
        bucket.read(ROLE)
    play(server, answer(200), "PUT")
    with pytest.raises(Unknown, match="its answer to a write has no ETag"):
        bucket.replace(ROLE, written, later(written))


# --- credentials


def test_credentials_that_were_replaced_are_taken_after_the_old_ones_were_refused(
    server: S3Server, bucket: LeaseBucket, written: LeaseRecord, tmp_path: Path
):
    server.script = lambda asked: None if "Credential=NEWKEY/" in asked.headers["authorization"] else error(400, "ExpiredToken")
    with pytest.raises(Unknown, match="have expired"):
        bucket.read(ROLE)
    write_credentials(tmp_path / "credentials", "NEWKEY")
    with pytest.raises(Invalid, match="has no AWS_SECRET_ACCESS_KEY"):
        _half_written(bucket, tmp_path / "credentials")
    write_credentials(tmp_path / "credentials", "NEWKEY")
    assert bucket.read(ROLE) == written


def _half_written(bucket: LeaseBucket, file: Path) -> None:
    file.write_text("AWS_ACCESS_KEY_ID=NEWKEY\n")
    bucket.read(ROLE)


def test_no_secret_is_in_an_error_or_in_its_causes(server: S3Server, place: ObjectPlace, tmp_path: Path):
    write_credentials(tmp_path / "credentials", token=TOKEN)
    bucket = LeaseBucket(place, TIMEOUT_S)
    for what in (error(403, "SignatureDoesNotMatch"), Play.CUT, error(412, "PreconditionFailed"), answer(200)):
        play(server, what)
        with pytest.raises((Unknown, Lost)) as raised:
            bucket.replace(ROLE, None, record())
        text = everything(raised.value)
        assert SECRET not in text
        assert TOKEN not in text
    assert SECRET not in repr(place.read_credentials())


# --- the port


def leases(place: ObjectPlace) -> ObjectLeases:
    return ObjectLeases(ThreadMachine(), place, LeaseTimings(ttl_s=180.0, renew_s=60.0, request_timeout_s=TIMEOUT_S))


async def test_who_gives_up_waiting_waits_for_no_thread(server: S3Server, place: ObjectPlace):
    asked = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hang(one: Asked) -> Play:
        token.run_sync_soon(asked.set)
        return Play.HANG

    server.script = hang
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leases(place).read, ROLE)
        await asked.wait()
        nursery.cancel_scope.cancel()
    assert server.hanging == 1, "the request is still under way"


async def test_who_was_given_up_sends_no_further_request(server: S3Server, place: ObjectPlace, bucket: LeaseBucket, written: LeaseRecord):
    """Its write would leave beside the next one, and there is one at a time."""
    scope = trio.CancelScope()
    token = trio.lowlevel.current_trio_token()

    def give_up_first(one: Asked) -> None:
        trio.from_thread.run_sync(scope.cancel, trio_token=token)

    stranger = leases(place)  # it has to ask for the version first
    server.script = give_up_first
    with scope:
        await stranger.replace(ROLE, written, later(written))
    assert scope.cancelled_caught
    await trio.to_thread.run_sync(lambda: wait_for(lambda: stranger.idle, "the end of the thread that was given up"))
    assert methods(server) == ["GET"]


@pytest.mark.parametrize(
    ("what", "why"), [(error(403, "ExpiredToken"), "the credentials have expired"), (error(404, "NoSuchBucket"), "there is no such bucket")]
)
async def test_a_store_that_cannot_be_tried_out_is_unavailable_and_says_why(what: bytes, why: str, server: S3Server, place: ObjectPlace):
    play(server, what)
    with pytest.raises(Unavailable, match=why) as unavailable:
        await leases(place).check()
    assert str(place) in unavailable.value.message


async def test_credentials_that_are_not_there_are_the_operators_to_mend(place: ObjectPlace, tmp_path: Path):
    (tmp_path / "credentials").unlink()
    with pytest.raises(Invalid, match=r"store\.s3_credentials: .*credentials cannot be read"):
        await leases(place).check()
