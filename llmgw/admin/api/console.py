"""The console's pages and its sign-in. The pages are files of the package; what they show comes from `/api/v1` like anybody's.

Nothing here knows under which path a proxy shows us: every address we give out is relative, and the cookie's path is left to the
browser, which takes the one above `session`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from llmgw.admin.auth import FailureLimit
from llmgw.admin.calls import Call, Reply, Route
from llmgw.admin.sign_in import Opened, SignIn
from llmgw.domain.errors import Denied, Invalid, NotFound, Unauthenticated
from llmgw.settings.address import is_loopback

SECRET_CHARS_MAX: Final = 1_000  # of a pasted token
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'"
)
# The root is asked for with and without a slash at its end, and only the browser knows which: a relative redirect would leave
# the proxy's path in one of the two. One line of script, allowed by its hash, goes on from where the browser is.
_GO_ON: Final = 'location.replace(location.pathname.replace(/\\/?$/, "/") + "console/" + location.search + location.hash)'
_ROOT: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>llmgw</title>'
    f'<script>{_GO_ON}</script><noscript><a href="console/">The console of llmgw</a> needs JavaScript.</noscript></html>\n'
)
_GO_ON_HASH: Final = base64.b64encode(hashlib.sha256(_GO_ON.encode()).digest()).decode()
_ROOT_POLICY: Final = f"default-src 'none'; script-src 'sha256-{_GO_ON_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@attrs.frozen
class Asset:
    text: str
    content_type: str
    etag: str


def load_assets() -> Mapping[str, Asset]:
    """Every file that a browser may ask for, by its path below `/console/`."""
    return dict(_walk(resources.files("llmgw.admin").joinpath("console"), ""))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif (kind := TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            data = entry.read_bytes()
            yield f"{prefix}{entry.name}", Asset(data.decode(), kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def routes(sign_in: SignIn, failures: FailureLimit) -> tuple[Route, ...]:
    assets = load_assets()

    async def root(call: Call) -> Reply:
        headers = {"Content-Security-Policy": _ROOT_POLICY, "Cache-Control": "no-cache"}
        return Reply(text=_ROOT, content_type=TYPES[".html"], headers=headers)

    async def without_slash(call: Call) -> Reply:
        return Reply(status=308, headers={"Location": "console/"}, text="", content_type="text/plain")

    async def index(call: Call) -> Reply:
        return show(call, "index.html")

    async def asset(call: Call, file: str) -> Reply:
        return show(call, file)

    def show(call: Call, file: str) -> Reply:
        found = assets.get(file)
        if found is None:
            raise NotFound(f"the console has no file {file[:100]!r}")
        # Asked for again each time and answered with 304: after an upgrade no page runs with yesterday's script.
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "ETag": found.etag}
        if found.etag in call.headers.get("if-none-match", ""):
            return Reply(status=304, headers=headers, text="", content_type=found.content_type)
        return Reply(text=found.text, content_type=found.content_type, headers=headers)

    async def who(call: Call) -> Reply:
        return Reply(session_view(sign_in.check(_raw(call), "GET")))

    async def enter(call: Call) -> Reply:
        if call.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Invalid("sign-in takes application/json", param="content-type")  # which no form of another page can send
        if call.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Denied("another page may not sign in here", code="cross_site")
        table = call.table(("link", "token"))
        if len(table) != 1:
            raise Invalid('sign in with {"token": TEXT} or {"link": CODE}')
        ((how, secret),) = table.items()
        if not isinstance(secret, str) or not 0 < len(secret) <= SECRET_CHARS_MAX:
            raise Invalid(f"{how} is a text of 1 to {SECRET_CHARS_MAX} characters", param=how)
        try:
            opened = sign_in.by_link(secret) if how == "link" else sign_in.by_token(secret.strip())
        except Unauthenticated:
            failures.failed(call.peer)
            raise
        cookie = f"{sign_in.cookie_name}={opened.cookie}; HttpOnly; SameSite=Strict{'; Secure' if needs_secure(call.headers) else ''}"
        return Reply(session_view(opened), 201, {"Set-Cookie": cookie})

    async def leave(call: Call) -> Reply:
        headers = _raw(call)
        try:
            sign_in.check(headers, call.method)
            sign_in.end(headers)
        except Unauthenticated:
            pass  # it is over
        return Reply({"signed_in": False}, headers={"Set-Cookie": f"{sign_in.cookie_name}=; HttpOnly; SameSite=Strict; Max-Age=0"})

    return (
        Route("GET", "/", root, "The way to the console", None),
        Route("GET", "/console", without_slash, "The way to the console", None),
        Route("GET", "/console/", index, "The console", None),
        Route("GET", "/console/<name:file>", asset, "A file of the console", None),
        Route("GET", "/session", who, "Who is signed in", None),
        Route("POST", "/session", enter, "Sign in", None, remembered=False),
        Route("DELETE", "/session", leave, "Sign out", None, remembered=False),
    )


def session_view(opened: Opened) -> dict[str, Any]:
    return {"name": opened.principal.name, "role": opened.principal.role.value, "csrf": opened.csrf}


def needs_secure(headers: Mapping[str, str]) -> bool:
    """Is the page anything but plain HTTP on loopback? A browser's Origin tells, also behind a proxy that ends TLS."""
    origin = urlsplit(headers.get("origin", ""))
    host = origin.hostname if origin.hostname else urlsplit(f"//{headers.get('host', '')}").hostname
    return origin.scheme == "https" or not is_loopback(host or "")


def _raw(call: Call) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin1"), value.encode("latin1")) for name, value in call.headers.items()]
