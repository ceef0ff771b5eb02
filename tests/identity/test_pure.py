"""The rules of identity: names in certificates, join tokens in print, who may come in, when a certificate is renewed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid
from llmgw.domain.identity import MachineIdentity, MachineRole, Presented, parse_uri, plain_serial
from llmgw.identity import ca, certificates
from llmgw.identity.admission import Ended, refusal
from llmgw.identity.join_tokens import TOKEN_BEGIN, JoinToken, hash_secret, parse_token, print_token, token_id
from llmgw.identity.pin import is_pin, pin_of, same_pin
from llmgw.store.identities import StoredIdentity, StoredToken, token_fault

NOW = 1_800_000_000.0
NAMES = st.text(st.characters(min_codepoint=0x21, exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
ROLES = st.sampled_from(MachineRole)
SERIALS = st.integers(1, 2**127).map(lambda number: f"{number:x}")


@given(NAMES, ROLES, NAMES)
@example("c-1", MachineRole.AGENT, "a/b?c#d%2f:é")
def test_a_name_comes_out_of_a_certificate_as_it_went_in(cluster: str, role: MachineRole, name: str) -> None:
    identity = MachineIdentity(cluster, role, name)
    assert identity.uri.isascii()
    assert parse_uri(identity.uri) == identity


@given(st.text(max_size=60))
@example("llmgw://c/agent/a/b")
@example("llmgw://c/leader/a")
@example("llmgw://c/agent/%61")  # another spelling of a name that is compared as text elsewhere
@example("llmgw://c/agent/a\n")
def test_no_other_text_names_a_machine(text: str) -> None:
    found = parse_uri(text)
    assert found is None or found.uri == text


@given(
    NAMES.filter(lambda name: name.isprintable()),
    ROLES,
    st.lists(st.sampled_from(["https://a:1", "https://[::1]:8081/x"]), min_size=1, max_size=16),
)
def test_a_join_token_reads_as_it_was_printed_and_is_one_word_of_a_shell(name: str, role: MachineRole, addresses: list[str]) -> None:
    token = JoinToken("ab" * 32, role, name, "sha256:" + "0" * 64, tuple(addresses))
    printed = print_token(token)
    assert set(printed) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    assert parse_token(f"  {printed}\n") == token
    assert token.secret not in repr(token)


@given(st.data())
def test_a_join_token_that_was_cut_or_mistyped_is_refused_and_not_repeated(data: st.DataObject) -> None:
    printed = print_token(JoinToken("ab" * 32, MachineRole.AGENT, "gpu-1", "sha256:" + "0" * 64, ("https://a:1",)))
    at = data.draw(st.integers(0, len(printed) - 1))
    letter = data.draw(st.sampled_from("abcXYZ019-_").filter(lambda one: one != printed[at]))
    for wrong in (printed[:at], printed[:at] + letter + printed[at + 1 :]):
        with pytest.raises(Invalid) as refused:
            parse_token(wrong)
        assert printed[len(TOKEN_BEGIN) : -9] not in refused.value.message


@given(st.text(max_size=80))
@example(f"{TOKEN_BEGIN}e30.44136fa3")
@example(f"{TOKEN_BEGIN}W10.")
def test_any_text_in_place_of_a_token_is_one_sentence(text: str) -> None:
    with pytest.raises(Invalid, match="join token"):
        parse_token(text)


def test_a_token_with_addresses_without_tls_is_none() -> None:
    with pytest.raises(Invalid, match="another build"):
        parse_token(print_token(JoinToken("ab", MachineRole.AGENT, "", "sha256:" + "0" * 64, ("http://a:1",))))


TOKEN = StoredToken("j-1", "0" * 64, MachineRole.AGENT, "gpu-1", NOW, "first", NOW + 3600)


@pytest.mark.parametrize(
    ("token", "role", "name", "key", "at", "code"),
    [
        (TOKEN, MachineRole.AGENT, "gpu-1", "k", NOW, None),
        (TOKEN, MachineRole.AGENT, "gpu-1", "k", NOW + 3600, "join_token_expired"),
        (TOKEN, MachineRole.ROUTER, "gpu-1", "k", NOW, "join_token_role"),
        (TOKEN, MachineRole.AGENT, "gpu-2", "k", NOW, "join_token_name"),
    ],
)
def test_a_token_lets_in_what_it_is_for(token, role, name, key, at, code) -> None:
    fault = token_fault(token, role, name, key, at)
    assert (None if fault is None else fault[0]) == code


@given(st.lists(st.tuples(SERIALS, ROLES, st.sampled_from(["a", "b"]), st.booleans()), max_size=8, unique_by=lambda row: row[0]), SERIALS)
def test_whose_certificates_were_revoked_comes_in_with_none_of_them_and_whose_were_not_with_each(rows, unknown) -> None:
    held = [
        StoredIdentity(serial, role, name, "k", (), NOW, "self", NOW + 9, NOW if revoked else None) for serial, role, name, revoked in rows
    ]
    ended = Ended.of(held)
    for one, (serial, role, name, revoked) in zip(held, rows, strict=True):
        shown = Presented(MachineIdentity("c", role, name), serial, NOW, NOW + 9)
        found = refusal(shown, "c", [role], ended, NOW)
        assert (found is not None and found[0] == "certificate_revoked") == revoked, one
        others = [other for other in MachineRole if other is not role]
        assert (refusal(shown, "c", others, ended, NOW) or ("",))[0] == "certificate_role"
        assert (refusal(shown, "other", [role], ended, NOW) or ("",))[0] == "certificate_foreign"
        assert (refusal(shown, "c", [role], Ended(), NOW + 10) or ("",))[0] == "certificate_expired"
    # One that nobody knows, of a machine of which one was revoked: from before the store was restored, say.
    for _, role, name, revoked in rows:
        if revoked and unknown not in ended.known:
            assert refusal(Presented(MachineIdentity("c", role, name), unknown, NOW, NOW + 9), "c", [role], ended, NOW) is not None


@pytest.mark.parametrize(("key", "code"), [("old", "certificate_revoked"), ("new", None), ("", "certificate_revoked")])
def test_whoever_joined_anew_after_it_was_revoked_comes_in_by_what_it_makes_with_its_new_key(key: str, code: str | None) -> None:
    role = MachineRole.SERVER
    held = [
        StoredIdentity("1", role, "ctl-2", "old", (), NOW, "j-1", NOW + 9, NOW),
        StoredIdentity("2", role, "ctl-2", "new", (), NOW, "j-2", NOW + 9),
    ]
    fault = refusal(Presented(MachineIdentity("c", role, "ctl-2"), "3", NOW, NOW + 9, key), "c", [role], Ended.of(held), NOW)
    assert (None if fault is None else fault[0]) == code


def test_a_secret_is_kept_as_its_hash_and_named_by_a_part_of_that() -> None:
    assert token_id(hash_secret("s")).startswith("j-")
    assert "s" * 20 not in hash_secret("s" * 20)


@given(st.integers(1, 2**160))
def test_a_serial_has_one_spelling(number: int) -> None:
    assert plain_serial(f"{number:X}") == plain_serial(f"0x000{number:x}") == f"{number:x}"


# --- the CA

CA = ca.make_ca("c-1", NOW, "0f" * 16)
OTHER = ca.make_ca("c-1", NOW, "0e" * 16)
AGENT = MachineIdentity("c-1", MachineRole.AGENT, "gpu-1")


def leaf(authority=CA, identity=AGENT, addresses=("10.0.0.1", "gpu-1.example"), at=NOW, key=None):
    key = key or ca.make_key()
    issued = ca.issue(authority, ca.read_request(ca.make_request(key)), identity, addresses, at, "ab" * 16)
    return key, issued, certificates.read_leaf(issued.pem.encode())


def test_a_certificate_says_who_where_and_for_how_long() -> None:
    _, issued, found = leaf()
    assert found.identity == issued.identity == AGENT
    assert found.presented.serial == issued.serial
    assert found.addresses == {"10.0.0.1", "gpu-1.example"}
    assert found.not_after_wall_s - NOW == ca.LEAF_DAYS * ca.DAY_S
    assert NOW - found.not_before_wall_s == ca.BACKDATED_S
    assert certificates.covers(found, ["GPU-1.example", "10.0.0.1"])
    assert not certificates.covers(found, ["10.0.0.2"])


def test_it_is_renewed_when_a_third_of_its_life_is_left() -> None:
    _, issued, found = leaf()
    life_s = issued.not_after_wall_s - issued.not_before_wall_s
    assert found.renew_at_wall_s == pytest.approx(issued.not_after_wall_s - life_s / 3)
    assert 29 < (issued.not_after_wall_s - found.renew_at_wall_s) / ca.DAY_S < 31


@pytest.mark.parametrize(
    ("made", "at", "role", "code"),
    [
        ({}, NOW, MachineRole.AGENT, None),
        ({"authority": OTHER}, NOW, MachineRole.AGENT, "certificate_foreign"),
        ({}, NOW, MachineRole.ROUTER, "certificate_role"),
        ({}, NOW + 91 * ca.DAY_S, MachineRole.AGENT, "certificate_expired"),
        ({}, NOW - 3600, MachineRole.AGENT, "certificate_not_yet_valid"),
    ],
)
def test_each_fault_of_a_certificate_has_its_own_code(made, at, role, code) -> None:
    key, _, found = leaf(**made)
    if code is None:
        certificates.check_leaf(found, key, CA.certificate, at, role)
        return
    with pytest.raises(Invalid) as refused:
        certificates.check_leaf(found, key, CA.certificate, at, role)
    assert refused.value.code == code


def test_a_certificate_and_the_key_of_another_are_told_apart() -> None:
    with pytest.raises(Invalid) as refused:
        certificates.check_leaf(leaf()[2], ca.make_key(), CA.certificate, NOW, MachineRole.AGENT)
    assert refused.value.code == "certificate_key"


def test_the_pin_is_of_the_key_and_stays_with_it() -> None:
    again = ca.certify(CA.key_pem.encode(), "c-1", NOW + 9, "01" * 16)
    assert again.pem != CA.pem
    assert same_pin(again.pin, CA.pin)
    assert is_pin(CA.pin)
    assert pin_of(OTHER.certificate) != CA.pin
    assert ca.read_authority(CA.key_pem.encode(), CA.pem.encode()).cluster == "c-1"


@pytest.mark.parametrize(
    ("key", "certificate", "words"),
    [
        (b"", CA.pem.encode(), "cannot be read"),
        (CA.key_pem.encode(), b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (OTHER.key_pem.encode(), CA.pem.encode(), "not that of its certificate"),
        (CA.key_pem.encode(), leaf()[1].pem.encode(), "not of a CA"),
    ],
)
def test_what_is_no_ca_is_refused_in_words(key, certificate, words) -> None:
    with pytest.raises(Invalid, match=words):
        ca.read_authority(key, certificate)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin1")))
@example("x" * 9000)
@example("\ud800")
def test_any_text_in_place_of_a_request_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="request"):
        ca.read_request(text)


@given(st.text(max_size=70))
@example("a..b")
@example("-a")
@example("a" * 64)
def test_what_is_an_address_goes_into_a_certificate(text: str) -> None:
    if ca.address_fault(text) is None:
        assert certificates.covers(leaf(addresses=(text,))[2], [text])


def test_secrets_stand_in_no_text_of_a_value() -> None:
    assert "PRIVATE" not in repr(CA)
    assert "0" * 64 not in repr(TOKEN)
