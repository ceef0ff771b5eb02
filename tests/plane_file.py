"""The settings file of a control plane for tests: a quick lease, ports of the kernel's choice, clients without keys."""

from __future__ import annotations

from pathlib import Path


def plane_file(
    folder: Path,
    name: str,
    store: str,
    *,
    host: str = "127.0.0.1",
    admin_port: int = 0,
    advertise: str = "",
    plain: str = "",
    more: str = "",
) -> str:
    """Its data directory is `folder / name`. `store` are the lines of `[store]`, "" for none; `plain` is `[tls] plain`."""
    return f"""
        [server]
        name = "{name}"
        data_dir = "{folder / name}"
        admin_listen = "{host}:{admin_port}"
        {f'advertise = "{advertise}"' if advertise else ""}
        {f"[store]{chr(10)}{store}" if store else ""}
        [router]
        listen = "{host}:0"
        {f'[tls]{chr(10)}plain = "{plain}"' if plain else ""}
        [lease]
        ttl_s = 3
        renew_s = 1
        poll_s = 0.1
        [auth]
        required = false
        {more}
    """


def shared_store(folder: Path) -> str:
    """A file that several control planes of one machine share."""
    return f'path = "{folder / "shared" / "llmgw.db"}"'
