"""Addresses that an operator writes: where to listen, whom to dial, which ports engines get. Text to values; opens nothing."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

import attrs

PORT_MAX: Final = 65535
UNIX_PATH_MAX: Final = 107  # bytes: sun_path of Linux holds 108 with the closing zero (unix(7))
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_V6: Final = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\Z")
_DIGITS: Final = re.compile(r"[0-9]{1,5}\Z")
_PRINTABLE: Final = re.compile(r"[!-~]+\Z")


@attrs.frozen
class TcpAddress:
    """`host` is a name or an address without brackets; `port` 0 asks the kernel for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


@attrs.frozen
class UnixAddress:
    """A socket in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    @property
    def loopback(self) -> bool:
        return True


def is_loopback(host: str) -> bool:
    """Does `host` (no brackets) name this machine only? Judged by its text: names other than localhost are not looked up."""
    return host == "localhost" or host == "::1" or re.match(r"127\.\d+\.\d+\.\d+\Z", host) is not None


def parse_listen(text: str) -> TcpAddress | UnixAddress:
    """`host:port`, `[v6]:port` or `unix:/path`. Raises ValueError with the reason."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise ValueError(f"expected unix: and an absolute path, not {text!r}")
        if len(path.encode("utf-8", "surrogatepass")) > UNIX_PATH_MAX:
            raise ValueError(f"the path of a unix socket has at most {UNIX_PATH_MAX} bytes: {path!r}")
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f'expected host:port, [v6]:port or unix:/path, not {text!r} (for every address of this machine: "0.0.0.0:PORT")')
    return TcpAddress(_host(host, text), _port(port, text))


def _host(host: str, text: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        inner = host[1:-1]
        if _V6.match(inner) is None or not _is_v6(inner):
            raise ValueError(f"{inner!r} is not an IPv6 address, in {text!r}")
        return inner
    if ":" in host:
        raise ValueError(f"an IPv6 address stands in brackets, as in [::1]:8080, not {text!r}")
    if not host:
        raise ValueError(f'the host is missing in {text!r} (for every address of this machine: "0.0.0.0{text}")')
    if _HOST.match(host) is None:
        raise ValueError(f"{host!r} is not a host name or address, in {text!r}")
    return host


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _port(port: str, text: str) -> int:
    if _DIGITS.match(port) is None or int(port) > PORT_MAX:
        raise ValueError(f"the port must be a number from 0 to {PORT_MAX}, in {text!r}")
    return int(port)


def listen_fault(text: str) -> str | None:
    """Why `text` is no address to listen on, or None."""
    try:
        parse_listen(text)
    except ValueError as err:
        return str(err)
    return None


def tcp_listen_fault(text: str) -> str | None:
    """As `listen_fault`, for listeners that cannot be a unix socket."""
    if text.startswith("unix:"):
        return f"expected host:port or [v6]:port, not {text!r}"
    return listen_fault(text)


def leads_to(url: str, listen: str) -> bool:
    """Is whoever listens on `listen` the one at `url`? Both are sound, and judged by their texts: no name but localhost is known."""
    where = parse_listen(listen)
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0]
    host, port = authority, "443" if scheme == "https" else "80"
    if not authority.endswith("]") and ":" in authority:
        host, _, port = authority.rpartition(":")
    if isinstance(where, UnixAddress) or where.port != int(port):
        return False
    dialled = {_TO_ITSELF.get(place, place) for place in _places(host.strip("[]"))}
    if where.host == "0.0.0.0":
        return any(place.startswith("127.") for place in dialled)
    if _places(where.host) == {"::"}:  # IPv4 comes in there as well
        return any(is_loopback(place) for place in dialled)
    return not dialled.isdisjoint(_places(where.host))


_TO_ITSELF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where Linux connects to for these


def _places(host: str) -> frozenset[str]:
    """The addresses, each in one spelling, that a host without brackets stands for; a name stands for itself."""
    if host.lower() == "localhost":
        return frozenset({"127.0.0.1", "::1"})
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return frozenset({host.lower()})
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return frozenset({str(inner or address)})


def url_fault(text: str) -> str | None:
    """Why `text` is no http(s) address with a host and at most a path, or None."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("http", "https"):
        return f"expected an http:// or https:// address, not {text!r}"
    if "@" in rest:  # first, so that no other fault repeats a password
        return "an address carries no user and password (and no @) here; secrets have keys of their own"
    if _PRINTABLE.match(rest) is None:
        return f"an address has no spaces and no characters beyond ASCII: {text!r}"
    authority, _, path = rest.partition("/")
    if "?" in rest or "#" in rest:
        return f"an address ends with its path, without ? or #: {text!r}"
    host = authority
    if not authority.endswith("]") and ":" in authority:
        host, _, port = authority.rpartition(":")
        if _DIGITS.match(port) is None or not 0 < int(port) <= PORT_MAX:
            return f"the port must be a number from 1 to {PORT_MAX}, in {text!r}"
    try:
        _host(host, text)
    except ValueError as err:
        return str(err)
    if "//" in f"/{path}":
        return f"the path holds // in {text!r}"
    return None


def engine_url_fault(text: str) -> str | None:
    """As `url_fault`, and without the /v1 that llmgw adds itself."""
    if (reason := url_fault(text)) is not None:
        return reason
    if text.rstrip("/").endswith("/v1"):
        return f"leave out /v1, which every request brings with it: {text.rstrip('/').removesuffix('/v1')!r}"
    return None


def optional_url_fault(text: str) -> str | None:
    return url_fault(text) if text else None


def urls_fault(values: tuple[str, ...]) -> str | None:
    """Every fault of a list of addresses, or that one stands there twice."""
    reasons = [reason for value in values if (reason := url_fault(value)) is not None]
    if reasons:
        return "; ".join(reasons)
    return repeated_fault(tuple(value.rstrip("/") for value in values))


def repeated_fault(values: tuple[str, ...]) -> str | None:
    """Names the first value that stands there twice, or None."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return f"{value!r} stands there twice"
        seen.add(value)
    return None


def origins_fault(values: tuple[str, ...]) -> str | None:
    """Browser origins: "*", or scheme://host[:port] as a browser sends it."""
    for value in values:
        if value == "*":
            continue
        scheme, separator, rest = value.partition("://")
        if not separator or not scheme or not rest or "/" in rest or _PRINTABLE.match(value) is None:
            return f'expected "*" or an origin like "https://app.example" without a path, not {value!r}'
    return repeated_fault(values)


def parse_ports(text: str) -> tuple[int, int]:
    """`low-high`, inclusive. Raises ValueError with the reason."""
    low, dash, high = text.partition("-")
    if not dash or _DIGITS.match(low.strip()) is None or _DIGITS.match(high.strip()) is None:
        raise ValueError(f'expected a range like "20000-20999", not {text!r}')
    ports = int(low), int(high)
    if not 1 <= ports[0] <= ports[1] <= PORT_MAX:
        raise ValueError(f"the ports of a range rise and lie between 1 and {PORT_MAX}, not {text!r}")
    return ports


def ports_fault(text: str) -> str | None:
    try:
        parse_ports(text)
    except ValueError as err:
        return str(err)
    return None
