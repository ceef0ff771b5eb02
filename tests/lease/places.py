"""Places on the object stores of tests, with their credentials in a file."""

from __future__ import annotations

from pathlib import Path

from llmgw.settings.object_place import ObjectPlace
from tests import seaweed
from tests.s3_server import BUCKET

KEY_ID = "AKIATEST"
SECRET = "s3cr3t/of+tests"
TOKEN = "t0ken/of+tests"


def write_credentials(file: Path, key_id: str = KEY_ID, secret: str = SECRET, token: str = "") -> None:
    lines = [f"AWS_ACCESS_KEY_ID={key_id}", f"AWS_SECRET_ACCESS_KEY={secret}", *([f"AWS_SESSION_TOKEN={token}"] if token else [])]
    file.write_text("\n".join(lines) + "\n")


def scripted_place(address: str, folder: Path, *, token: str = "") -> ObjectPlace:
    """On our own server."""
    file = folder / "credentials"
    write_credentials(file, token=token)
    return ObjectPlace(BUCKET, "a/prefix", address, "eu-central-1", f"file:{file}")


def seaweed_place(server: seaweed.Seaweed, folder: Path) -> ObjectPlace:
    """A prefix of the real one that no other test has."""
    file = folder / "credentials"
    write_credentials(file, seaweed.ACCESS_KEY_ID, seaweed.SECRET_ACCESS_KEY)
    return ObjectPlace(seaweed.BUCKET, folder.name, server.endpoint, seaweed.REGION, f"file:{file}")
