"""The example file and the reference page say what the program says, and nothing else."""

from __future__ import annotations

from pathlib import Path

import attrs

from llmgw.settings import decode
from llmgw.settings.example import example_text, uncommented
from llmgw.settings.layout import object_sections, settings_sections
from llmgw.settings.load import Role, load_text
from llmgw.settings.reference import reference_text
from llmgw.settings.schema import EndpointTable, KeyTable, ModelTable, ProfileTable, Settings

ROOT = Path(__file__).parent.parent.parent


def test_the_example_in_the_repository_is_the_one_the_program_writes():
    assert (ROOT / "llmgw.toml.example").read_text(encoding="utf-8") == example_text()


def test_the_reference_in_the_repository_is_the_one_the_program_writes():
    assert (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8") == reference_text()


def test_the_example_as_it_stands_changes_nothing():
    loaded = load_text(example_text(), source="example", environ={})
    assert attrs.evolve(loaded.settings, engines={}) == attrs.evolve(load_text("", source="empty").settings, engines={})
    assert loaded.given == frozenset()
    assert (loaded.models, loaded.keys, loaded.endpoints) == ((), (), ())


def test_the_example_with_every_line_in_force_loads_without_faults_for_every_role():
    text = uncommented(example_text())
    for role in (None, *Role):
        loaded = load_text(text, source="example", role=role, environ={"U1_KEY": "k"})
        assert [spec.name for spec in loaded.models] == ["llama-8b"]
        assert [endpoint.id for endpoint in loaded.endpoints] == ["u1"]
        assert len(loaded.keys) == 2


def test_every_key_of_the_schema_stands_in_the_example_and_in_the_reference():
    import tomllib

    raw = tomllib.loads(uncommented(example_text()))
    given = set(decode.given_paths(raw))
    for path in decode.known_paths(Settings):
        if path == "engines":
            assert raw["engines"]["vllm"].keys() == {"command", "load_limit_s", "progress_limit_s"}
        else:
            assert any(key == path or key.startswith(f"{path}.") for key in given), path
    keys = {key for table in raw["auth"]["key"] for key in table}
    profiles = {key for profile in raw["model"][0]["profile"] for key in profile}
    assert keys == {field.name for field in attrs.fields(KeyTable)}
    assert profiles == {field.name for field in attrs.fields(ProfileTable)}
    assert raw["model"][0].keys() == {field.name for field in attrs.fields(ModelTable)}
    assert raw["endpoint"][0].keys() == {field.name for field in attrs.fields(EndpointTable)}
    page = reference_text()
    for section in (*settings_sections(), *object_sections()):
        assert section.header.replace("engines.vllm", "engines.<name>") in page
        assert section.rows
        for row in section.rows:
            assert f"| `{row.name}` |" in page


def test_every_number_has_a_range_and_every_key_a_sentence():
    for section in (*settings_sections(), *object_sections()):
        for row in section.rows:
            assert row.meta.help.endswith("."), (section.name, row.name)
            if row.type_text in ("whole number", "number"):
                assert row.meta.low is not None, (section.name, row.name)
                assert row.meta.high is not None, (section.name, row.name)
            if row.name.endswith("_s"):
                assert row.meta.unit == "s", (section.name, row.name)


def test_one_table_has_one_scope():
    for section in settings_sections():
        assert {row.meta.scope for row in section.rows} == {section.scope}, section.name
