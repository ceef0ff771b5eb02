"""Where the object store is and with which credentials it is asked, from what stands in the settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid
from llmgw.settings.object_place import Credentials, ObjectPlace
from llmgw.settings.schema import StoreSettings

ENVIRON = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "hush"}


@pytest.mark.parametrize(
    ("replica", "bucket", "prefix", "shown"),
    [
        ("s3://b-1.x", "b-1.x", "", "s3://b-1.x"),
        ("s3://b-1.x/", "b-1.x", "", "s3://b-1.x"),
        ("s3://bucket/a", "bucket", "a", "s3://bucket/a"),
        ("s3://bucket/a/b.c=d/", "bucket", "a/b.c=d", "s3://bucket/a/b.c=d"),
    ],
)
def test_a_place_is_read_from_its_settings(replica: str, bucket: str, prefix: str, shown: str):
    place = ObjectPlace.of(StoreSettings(replica=replica, s3_endpoint="https://s3.example:9000/", s3_region="auto"))
    assert place == ObjectPlace(bucket, prefix, "https://s3.example:9000", "auto", "env")
    assert str(place) == f"{shown} at https://s3.example:9000"
    assert place.key("lease") == (f"{prefix}/lease" if prefix else "lease")


def test_without_an_endpoint_it_is_the_regions_at_aws():
    assert ObjectPlace.of(StoreSettings(replica="s3://b-1/p", s3_region="eu-west-3")).endpoint == "https://s3.eu-west-3.amazonaws.com"


def place(credentials: str) -> ObjectPlace:
    return ObjectPlace("bucket", "p", "http://s3", "r", credentials)


def test_credentials_of_the_environment_may_have_a_session_token():
    assert place("env").read_credentials(ENVIRON) == Credentials("AKIA", "hush", "")
    assert place("env").read_credentials({**ENVIRON, "AWS_SESSION_TOKEN": "t"}) == Credentials("AKIA", "hush", "t")


@pytest.mark.parametrize("name", ENVIRON)
def test_a_variable_that_is_missing_is_named(name: str):
    with pytest.raises(Invalid, match=rf"store\.s3_credentials: the environment variable {name} is not set"):
        place("env").read_credentials({other: value for other, value in ENVIRON.items() if other != name})


@pytest.mark.parametrize(
    "text",
    [
        "AWS_ACCESS_KEY_ID=AKIA\nAWS_SECRET_ACCESS_KEY=hu=sh\nAWS_SESSION_TOKEN=t\n",
        "# rotated by vault\n\n[default]\naws_access_key_id = AKIA\naws_secret_access_key = hu=sh\naws_session_token = t\nregion = eu-1\n",
    ],
)
def test_a_file_of_credentials_is_read_in_the_form_of_variables_and_in_that_of_aws(text: str, tmp_path: Path):
    file = tmp_path / "credentials"
    file.write_text(text)
    found = place(f"file:{file}").read_credentials({"AWS_SESSION_TOKEN": "not this one"})
    assert found == Credentials("AKIA", "hu=sh", "t")
    file.write_text(text.replace("AKIA", "NEXT"))
    assert place(f"file:{file}").read_credentials({}).access_key_id == "NEXT"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("AWS_ACCESS_KEY_ID=AKIA\n", "has no AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID=\nAWS_SECRET_ACCESS_KEY=hush\n", "has no AWS_ACCESS_KEY_ID"),
        ("AKIA:hush\n", "line 1 is not NAME=value"),
        ("AWS_ACCESS_KEY_ID=AKIA\naws_access_key_id=B\n", "line 2 gives AWS_ACCESS_KEY_ID a second time"),
        ("[a]\naws_access_key_id=A\n[b]\n", "line 3 begins a second section"),
        ("AWS_ACCESS_KEY_ID=AKIA\nAWS_SECRET_ACCESS_KEY=hush hush\n", "AWS_SECRET_ACCESS_KEY of .* has characters"),
        ("AWS_ACCESS_KEY_ID=AKIA\nAWS_SECRET_ACCESS_KEY=hüsh\n", "AWS_SECRET_ACCESS_KEY of .* has characters"),
        ("\n", "is empty"),
    ],
)
def test_a_file_that_is_not_right_is_told_without_what_is_in_it(text: str, why: str, tmp_path: Path):
    file = tmp_path / "credentials"
    file.write_text(text)
    with pytest.raises(Invalid, match=rf"store\.s3_credentials: .*{why}") as refused:
        place(f"file:{file}").read_credentials({})
    assert str(file) in refused.value.message
    assert "hush" not in refused.value.message
    assert "AKIA" not in refused.value.message


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=1, max_size=60))
def test_whatever_can_stand_in_a_header_is_taken_as_it_is(text: str):
    assert place("env").read_credentials({**ENVIRON, "AWS_ACCESS_KEY_ID": text}).access_key_id == text


@given(st.text(max_size=60).filter(lambda text: not text.isascii() or not text.isprintable() or " " in text))
def test_whatever_cannot_is_refused_by_its_name(text: str):
    with pytest.raises(Invalid, match="AWS_ACCESS_KEY_ID"):
        place("env").read_credentials({**ENVIRON, "AWS_ACCESS_KEY_ID": text})


def test_no_secret_is_shown_by_accident():
    assert "hush" not in repr(Credentials("AKIA", "hush", "hush"))
