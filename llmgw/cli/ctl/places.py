"""Which control plane ctl talks to and with which token: flags, environment, files. A token goes only to the server it was kept for."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from llmgw.domain.errors import Invalid, Unauthenticated, Unavailable
from llmgw.domain.words import a_value
from llmgw.settings.address import is_loopback, parse_listen, url_fault
from llmgw.settings.running import running_files
from llmgw.settings.user_dirs import config_dir, running_dir

DEFAULT_SERVER: Final = "http://127.0.0.1:8081"  # [server] admin_listen's default
TOKEN_VARIABLE: Final = "LLMGW_TOKEN"
CA_VARIABLE: Final = "LLMGW_CA"  # a file of certificates (PEM), for a server that is no other's
ROUTER_PORT: Final = "router_port"  # the code of a router's answer to what belongs to the admin API
ANSWER_BYTES_MAX: Final = 65_536  # an error of ours has a few hundred
LOOK_S: Final = 0.5  # a listener on loopback takes a connection at once; a frozen one must not hold up the search


@attrs.frozen
class Target:
    """`server` has no trailing slash. `ca` is a file of certificates, "" for the system's."""

    server: str
    token: str = attrs.field(repr=False)
    ca: str = ""


@attrs.frozen
class Places:
    """Where things are looked for; a test has its own."""

    user_file: Path
    dev_dir: Path  # a file for each `llmgw dev` that runs
    machine_file: Path = Path("/etc/llmgw/llmgw.toml")
    machine_dir: Path = Path("/var/lib/llmgw")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        return cls(user_file=config_dir(environ) / "ctl.toml", dev_dir=running_dir(environ))


@attrs.frozen
class _Kept:
    """What a ctl.toml holds."""

    server: str = ""
    token: str = attrs.field(default="", repr=False)
    ca: str = ""


def find(asked: str, environ: Mapping[str, str] | None = None, places: Places | None = None) -> Target:
    """The server and token to use; `asked` is `--server`, "" for none.

    Raises Invalid for a bad address or file, Unauthenticated when no token is known, Unavailable when nothing runs here.
    """
    environ = os.environ if environ is None else environ
    places = places or Places.of(environ)
    if asked and (reason := url_fault(asked)) is not None:
        raise Invalid(f"--server: {reason}")
    token = environ.get(TOKEN_VARIABLE, "").strip()
    user = _read_kept(places.user_file)
    user_server = user.server or (DEFAULT_SERVER if user.token else "")
    server = asked or user_server
    ca = environ.get(CA_VARIABLE, "").strip() or (user.ca if user_server and _same(server, user_server) else "")
    if server and not token and user_server and _same(server, user_server):
        token = user.token
    if server and token:
        return Target(server.rstrip("/"), token, ca)
    if not server or _host_is_loopback(server):
        return _on_this_machine(server, token, ca, places)
    raise _no_token(server, places, "")


def _on_this_machine(server: str, token: str, ca: str, places: Places) -> Target:
    devs = _running_devs(places.dev_dir, server)
    if len(devs) > 1:
        raise Invalid(f"several `llmgw dev` run here: {', '.join(dev.server for dev in devs)}; --server names one of them")
    if devs:
        return Target(devs[0].server.rstrip("/"), token or devs[0].token, ca or devs[0].ca)
    machine_server, file, machine_ca = _machine(places)
    if not server or _same(server, machine_server):
        server, ca = server or machine_server, ca or machine_ca
    if token:
        return Target(server.rstrip("/"), token, ca)
    note = ""
    try:
        kept = file.read_text(encoding="utf-8").strip()
        if kept and _same(server, machine_server):
            return Target(server.rstrip("/"), kept, ca)
    except PermissionError:
        note = f"; {file} holds one, which this user may not read"
    except (OSError, UnicodeDecodeError):
        pass
    if not _answers(server):
        raise Unavailable(f"nothing answers at {server}: is a control plane running here? Another one is named by --server")
    if _is_router(server):
        raise router_port(server)
    raise _no_token(server, places, note)


def _running_devs(folder: Path, server: str) -> list[_Kept]:
    """Every `llmgw dev` of this user that answers now, or the one of them that is `server`."""
    devs = [dev for file in running_files(folder) if (dev := _read_kept(file)).server]
    return [dev for dev in devs if (not server or _same(server, dev.server)) and _answers(dev.server)]


def _no_token(server: str, places: Places, note: str) -> Unauthenticated:
    return Unauthenticated(
        f"no token for {server}: set {TOKEN_VARIABLE}, or put server and token into {places.user_file}{note}", code="no_token"
    )


def _machine(places: Places) -> tuple[str, Path, str]:
    """This machine's control plane as its file has it: its address, the file of its admin token, and that of its CA ("" for none)."""
    try:
        file: dict[str, Any] = tomllib.loads(places.machine_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        file = {}

    def text(table: str, key: str, default: str = "") -> str:
        found = file[table].get(key) if isinstance(file.get(table), dict) else None
        return found if isinstance(found, str) else default

    listen, data_dir = text("server", "admin_listen"), Path(text("server", "data_dir", str(places.machine_dir)))
    own, plain = text("tls", "certificate"), text("tls", "plain", "loopback")
    server = reachable(listen)
    if own or plain == "never" or (plain == "loopback" and _beyond_loopback(listen)):
        server = server.replace("http://", "https://", 1)
    beside = (data_dir / text("store", "path", "llmgw.db")).parent if "store" in file and not text("store", "replica") else data_dir
    ca = beside / "ca" / "ca.pem"
    return server, data_dir / "admin-token", str(ca) if server.startswith("https://") and not own and ca.exists() else ""


def _beyond_loopback(listen: str) -> bool:
    """Can other machines reach it?"""
    try:
        return bool(listen) and not parse_listen(listen).loopback
    except ValueError:
        return False


def reachable(listen: str) -> str:
    """The address to dial for one that is listened on: every address of a machine includes loopback."""
    try:
        where = parse_listen(listen) if listen else None
    except ValueError:
        where = None
    if where is None:
        return DEFAULT_SERVER
    text = str(where)
    for everywhere, here in (("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")):
        text = here + text.removeprefix(everywhere) if text.startswith(everywhere) else text
    return f"http://{text}"


def _read_kept(file: Path) -> _Kept:
    """A ctl.toml, or nothing when there is none. Raises Invalid for one that cannot be understood."""
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return _Kept()
    except OSError as err:
        raise Invalid(f"{file} cannot be read: {err.strerror or err}") from err
    except UnicodeDecodeError as err:
        raise Invalid(f"{file} is not UTF-8 text") from err
    from llmgw.settings.toml_text import parse_toml  # here: without such a file ctl starts sooner

    table: dict[str, Any] = parse_toml(text, str(file))
    for key in ("server", "token", "ca"):
        if not isinstance(found := table.get(key, ""), str):
            raise Invalid(f"{file}: {key}: expected a string, not {a_value(found)}")
    server = table.get("server", "")
    if server and (reason := url_fault(server)) is not None:
        raise Invalid(f"{file}: server: {reason}")
    return _Kept(server, table.get("token", ""), table.get("ca", ""))


def split_url(server: str) -> tuple[str, str, int, str]:
    """(scheme, host, port, path without trailing slash) of an address that `url_fault` has passed."""
    scheme, _, rest = server.partition("://")
    authority, slash, path = rest.partition("/")
    host, port = authority, 443 if scheme == "https" else 80
    if ":" in authority and not authority.endswith("]"):
        host, _, digits = authority.rpartition(":")
        port = int(digits)
    return scheme, host.strip("[]"), port, (slash + path).rstrip("/")


def _same(one: str, other: str) -> bool:
    def normal(server: str) -> tuple[str, str, int, str]:
        scheme, host, port, path = split_url(server)
        return scheme, "localhost" if is_loopback(host) else host.lower(), port, path

    return normal(one) == normal(other)


def _host_is_loopback(server: str) -> bool:
    return is_loopback(split_url(server)[1])


def _answers(server: str) -> bool:
    """Does anything take a connection there? Asked of loopback addresses only."""
    _, host, port, _ = split_url(server)
    try:
        socket.create_connection((host, port), timeout=LOOK_S).close()
    except OSError:
        return False
    return True


def router_port(server: str) -> Invalid:
    """The error of an address that is a router's."""
    return Invalid(
        f"{server} is a router's port and no admin API: name the control plane's, [server] admin_listen, by default {DEFAULT_SERVER}",
        code=ROUTER_PORT,
    )


def _is_router(server: str) -> bool:
    """Does it say so? Asked without a token, of loopback addresses only; one that speaks TLS is not asked."""
    import http.client
    import json

    scheme, host, port, base = split_url(server)
    if scheme != "http":
        return False
    connection = http.client.HTTPConnection(host, port, timeout=LOOK_S)
    try:
        connection.request("GET", f"{base}/api/v1/status")
        code = json.loads(connection.getresponse().read(ANSWER_BYTES_MAX))["error"]["code"]
    except (OSError, http.client.HTTPException, ValueError, RecursionError, KeyError, TypeError):
        return False
    finally:
        connection.close()
    return bool(code == ROUTER_PORT)
