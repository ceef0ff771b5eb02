"""Which control planes are dialled, whatever leaders tell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.control.reach import planes_told
from llmgw.protocol.messages import ControlPlanes
from llmgw.protocol.planes import PLANES_MAX, dialled, remembered

NAMES = ("a", "b", "c")
URLS = tuple(f"https://{name}:1" for name in NAMES)
urls = st.lists(st.sampled_from(URLS), max_size=3).map(tuple)


@given(urls, st.lists(st.builds(ControlPlanes, urls, st.booleans()), max_size=5), st.dictionaries(st.sampled_from(URLS), st.just(URLS[0])))
def test_the_files_addresses_are_always_dialled_and_each_control_plane_once(configured, words, reached_at):
    known: tuple[str, ...] = ()
    for told in words:
        before, known = known, remembered(known, told)
        assert set(told.urls) <= set(known)
        assert told.whole or set(before) <= set(known)
        assert not told.whole or set(known) <= set(told.urls)
    found = dialled(configured, known, reached_at)
    assert set(configured) <= set(found) <= {*configured, *known}
    assert len(set(found)) == len(found)


def test_what_is_told_is_bounded_and_checked():
    assert remembered((), ControlPlanes(("ftp://x", "https://a:1/", "https://a:1"))) == ("https://a:1",)
    many = tuple(f"https://h{number}:1" for number in range(PLANES_MAX + 5))
    assert remembered(many, ControlPlanes(("https://new:1",)))[0] == "https://new:1"
    assert len(remembered(many, ControlPlanes(("https://new:1",)))) == PLANES_MAX


@given(
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from((*URLS, "", "http://plain:1"))),
    st.frozensets(st.sampled_from(NAMES)),
    st.frozensets(st.sampled_from(NAMES)),
)
def test_only_a_list_with_every_member_on_it_is_whole_and_nobody_removed_is_on_it(name, heard, members, removed):
    own = f"https://{name}:1"
    told = planes_told(name, own, heard, members - removed, removed.__contains__)
    assert told is not None
    others = {url for other, url in heard.items() if other != name and other not in removed and url.startswith("https://")}
    assert set(told.urls) == {own, *others}
    reached = {name, *(other for other, url in heard.items() if other not in removed and url.startswith("https://"))}
    assert told.whole == (name in members - removed and members - removed <= reached)


def test_a_control_plane_that_no_other_machine_reaches_tells_nothing():
    assert planes_told("a", "", {"b": "http://127.0.0.1:1"}, (), lambda name: False) is None
