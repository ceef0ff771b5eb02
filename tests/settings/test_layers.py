"""Default, the machine's file, the cluster's document: one value for each key, and whose it is."""

from __future__ import annotations

from typing import Any

import attrs
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.setting import Scope
from llmgw.settings.decode import known_paths
from llmgw.settings.document import EMPTY, Document, cluster_values_of, document_of, imported, parse_document
from llmgw.settings.layers import Layer, Origin, effective, ignored, layers
from llmgw.settings.load import Loaded, load_text, table_scope
from llmgw.settings.schema import Settings
from tests.settings.strategies import cluster_values

quick = settings(deadline=None, max_examples=150)
documents = cluster_values().map(lambda values: document_of(values, "drawn"))

OWN = st.fixed_dictionaries(
    {},
    optional={
        "server": st.fixed_dictionaries({}, optional={"name": st.sampled_from(("a", "b")), "data_dir": st.just("/d")}),
        "store": st.fixed_dictionaries({}, optional={"path": st.just("x.db")}),
        "router": st.fixed_dictionaries({}, optional={"workers": st.integers(1, 9), "cors_origins": st.just(["*"])}),
        "agent": st.fixed_dictionaries({}, optional={"labels": st.dictionaries(st.sampled_from(("gpu", "a.b")), st.just("x"))}),
        "log": st.fixed_dictionaries({"level": st.just("debug")}),
    },
)


def file_of(own: dict[str, Any], cluster: dict[str, Any]) -> Loaded:
    return load_text(tomli_w.dumps({**own, **cluster}), source="f")


def file(text: str) -> Loaded:
    return load_text(text, source="f")


def by_path(found: tuple[Layer, ...]) -> dict[str, Layer]:
    return {layer.path: layer for layer in found}


@quick
@given(OWN, cluster_values(), documents)
def test_layers_merge_the_same_in_one_step_or_two(own: dict[str, Any], in_vain: dict[str, Any], document: Document) -> None:
    two = effective(file_of(own, in_vain), document)
    one = file_of(own, dict(document.values)).settings
    assert two == one
    assert effective(attrs.evolve(file_of(own, in_vain), settings=two), document) == two


@quick
@given(OWN, cluster_values(), documents, documents)
def test_the_document_before_leaves_nothing_behind(own: dict[str, Any], cluster: dict[str, Any], before: Document, after: Document) -> None:
    """A key that the newer document does not hold has its default, and not the value of the older one or of the file."""
    mine = file_of(own, cluster)
    assert effective(attrs.evolve(mine, settings=effective(mine, before)), after) == effective(mine, after)
    assert attrs.evolve(effective(mine, after), **{name: getattr(Settings(), name) for name in MACHINE}) == after.settings


MACHINE = [field.name for field in attrs.fields(Settings) if table_scope(field.name) is Scope.MACHINE]


@quick
@given(OWN, cluster_values(), st.none() | documents)
def test_every_known_key_appears_once_with_the_value_in_force(
    own: dict[str, Any], cluster: dict[str, Any], document: Document | None
) -> None:
    mine = file_of(own, cluster)
    found = layers(mine, document)
    paths = [layer.path for layer in found]
    assert len(set(paths)) == len(paths)
    known = {path for path in known_paths(Settings) if path != "engines" and ("store" in own or not path.startswith("store."))}
    assert {path for path in paths if not path.startswith("engines.")} == known
    assert [path for path in paths if path in known] == [path for path in known_paths(Settings) if path in known]
    in_force = effective(mine, document)
    for layer in found:
        if not layer.path.startswith("engines."):
            value: Any = in_force
            for part in layer.path.split("."):
                value = getattr(value, part)
            assert layer.value == value


@quick
@given(OWN, cluster_values(), documents)
def test_a_key_of_the_cluster_is_the_documents_or_its_default_and_never_the_files(
    own: dict[str, Any], cluster: dict[str, Any], document: Document
) -> None:
    mine = file_of(own, cluster)
    for layer in layers(mine, document):
        in_file = layer.path in mine.given or any(path.startswith(f"{layer.path}.") for path in mine.given)
        if table_scope(layer.path.partition(".")[0]) is Scope.CLUSTER:
            assert layer.origin is (Origin.DOCUMENT if layer.path in document.paths else Origin.DEFAULT)
            assert (layer.in_vain is not None) == in_file
        else:
            assert layer.origin is (Origin.FILE if in_file else Origin.DEFAULT)
            assert layer.in_vain is None
    assert set(ignored(mine, document)) == {path for path in mine.given if table_scope(path.partition(".")[0]) is Scope.CLUSTER}


def test_without_a_document_the_files_keys_are_in_force_and_none_is_in_vain() -> None:
    mine = file('[lease]\nttl_s = 20\n[engines."llama.cpp"]\nload_limit_s = 9')
    found = by_path(layers(mine, None))
    assert found["lease.ttl_s"] == Layer("lease.ttl_s", 20.0, Origin.FILE)
    assert found["lease.poll_s"] == Layer("lease.poll_s", 1.0, Origin.DEFAULT)
    assert found['engines."llama.cpp".load_limit_s'] == Layer('engines."llama.cpp".load_limit_s', 9.0, Origin.FILE)
    assert ignored(mine, None) == ()


def test_what_the_file_says_in_vain_is_shown_beside_what_holds() -> None:
    mine = file("[lease]\nttl_s = 20\n[auth]\nrequired = false\n[engines.vllm]\nload_limit_s = 9")
    found = by_path(layers(mine, parse_document("[lease]\nttl_s = 30", "d")))
    assert found["lease.ttl_s"] == Layer("lease.ttl_s", 30.0, Origin.DOCUMENT, 20.0)
    assert found["auth.required"] == Layer("auth.required", True, Origin.DEFAULT, False)
    assert found["engines.vllm.load_limit_s"].in_vain == 9.0
    assert ignored(mine, EMPTY) == ("lease.ttl_s", "auth.required", "engines.vllm.load_limit_s")


def test_an_engine_that_only_the_file_names_has_its_defaults_once_there_is_a_document() -> None:
    mine = file("[engines.vllm]\nload_limit_s = 9")
    layer = by_path(layers(mine, EMPTY))["engines.vllm.load_limit_s"]
    assert (layer.value, layer.origin, layer.in_vain) == (1800.0, Origin.DEFAULT, 9.0)


def test_an_empty_document_is_not_an_absent_one() -> None:
    mine = file("[lease]\nttl_s = 20")
    assert effective(mine, None).lease.ttl_s == 20
    assert effective(mine, EMPTY).lease.ttl_s == 15


def test_a_habit_of_a_process_holds_until_the_document_says_otherwise() -> None:
    """`llmgw dev` on loopback asks for no keys. An import writes only what the file says, so the habit has to outlive the import."""
    mine = attrs.evolve(file(""), habits={"auth.required": False})
    assert effective(mine, imported(mine.cluster_values, "f")).auth.required is False
    assert effective(mine, parse_document("auth.required = true", "d")).auth.required is True
    assert by_path(layers(mine, EMPTY))["auth.required"].value is False
    assert by_path(layers(mine, parse_document("auth.required = true", "d")))["auth.required"].origin is Origin.DOCUMENT


def test_a_files_cluster_values_are_what_a_document_of_them_says() -> None:
    mine = file(
        '[lease]\nttl_s = 20\n[server]\nname = "x"\n[[auth.key]]\nname = "a"\nsha256 = "' + "0" * 64 + '"\n[auth]\nrequired = false'
    )
    assert document_of(mine.cluster_values, "f") == document_of(cluster_values_of(mine.settings), "f")
