"""References to secrets: `env:NAME` and `file:PATH`, checked as text and resolved when asked. No secret is kept or printed here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Invalid

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
SECRET_BYTES_MAX: Final = 65_536  # chosen: far above any token or key file; keeps a wrong path such as /dev/zero from filling memory


def env_name_fault(text: str) -> str | None:
    """Why `text` is no name of an environment variable, or None ("" is none given). It may be a secret and is not repeated."""
    if text and _ENV_NAME.match(text) is None:
        return "expected the name of an environment variable; a secret itself does not stand in this file"
    return None


def reference_fault(text: str) -> str | None:
    """Why `text` is no reference to a secret, or None ("" is none given). The text itself may be a secret and is not repeated."""
    if not text:
        return None
    kind, colon, rest = text.partition(":")
    if colon and kind == "env" and rest and _ENV_NAME.match(rest) is not None:
        return None
    if colon and kind == "file" and rest.startswith("/") and "\0" not in rest:
        return None
    return 'expected "env:NAME" or "file:/PATH"; a secret itself does not stand in this file'


def resolve(reference: str, path: str, environ: Mapping[str, str] | None = None) -> str:
    """The secret behind a reference, "" for "". `path` is the key that names it, for the error.

    Raises Invalid when the variable is not set, the file cannot be read, or there is nothing in it.
    """
    if not reference:
        return ""
    if (reason := reference_fault(reference)) is not None:
        raise Invalid(f"{path}: {reason}", param=path)
    kind, _, rest = reference.partition(":")
    if kind == "env":
        return read_environment(rest, path, environ)
    return read_secret_file(Path(rest), path)


def read_environment(name: str, path: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of an environment variable that the key `path` names. Raises Invalid when it is not set or empty."""
    value = (os.environ if environ is None else environ).get(name)
    if not value:
        raise Invalid(f"{path}: the environment variable {name} is {'empty' if value == '' else 'not set'}", param=path)
    return value


def read_secret_file(file: Path, path: str) -> str:
    """The text of a secret's file without the white space around it. Raises Invalid when it cannot be read or is empty."""
    try:
        with file.open("rb") as stream:
            data = stream.read(SECRET_BYTES_MAX + 1)
    except OSError as err:
        raise Invalid(f"{path}: {file} cannot be read: {err.strerror or err}", param=path) from err
    if len(data) > SECRET_BYTES_MAX:
        raise Invalid(f"{path}: {file} is larger than {SECRET_BYTES_MAX} bytes: that is no secret's file", param=path)
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError as err:
        raise Invalid(f"{path}: {file} is not text", param=path) from err
    if not text:
        raise Invalid(f"{path}: {file} is empty", param=path)
    return text
