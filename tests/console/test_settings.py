"""The console's Settings in a real Chromium: changed, looked at, saved, raced for and taken back, in front of a real `llmgw dev`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from selenium.webdriver.common.keys import Keys

from tests.admin.conftest import VIEWER, running_admin
from tests.programs import Admin, Program, call, chat, free_port, wait_for

from .conftest import HOSTILE, OnTerminal, Page

pytestmark = pytest.mark.slow
LIMIT = "guard.max_messages"


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnTerminal]:
    """One of its own: what is set here is in force for whoever else uses it."""
    one = OnTerminal(tmp_path_factory.mktemp("settings"), "--no-engine")
    try:
        wait_for(lambda: newest(one.admin)["version"], "the first version")
        yield one
    finally:
        one.close()


@pytest.fixture
def settings(dev: OnTerminal, page: Page) -> Page:
    """The form, with nothing set."""
    write(dev.admin, toml="", reset=True)
    page.sign_in(dev)
    page.go("settings")
    page.sees("keys", ".page-tools .count")
    return page


def newest(admin: Admin) -> dict[str, Any]:
    found: dict[str, Any] = admin("GET", "/settings")
    return found


def write(admin: Admin, method: str = "PUT", **body: Any) -> dict[str, Any]:
    written: dict[str, Any] = admin(method, "/settings", {"reason": "", **body}, **{"if-match": f'"{newest(admin)["version"]}"'})
    return written


def at(path: str) -> str:
    """The control of a key."""
    return f'[id="key-{path}"]'


def line(path: str) -> str:
    """A key with everything that is said of it."""
    return f'[data-path="{path}"]'


def value(page: Page, css: str) -> str | None:
    return page.one(css).get_attribute("value")


def press(page: Page, label: str) -> None:
    """A button that may stand below what sticks to the window's end."""
    button = page.button(label)
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()


def focused(page: Page, what: str) -> None:
    script = "const a = document.activeElement; return a.id || a.getAttribute('aria-label') || a.className || a.innerText"
    page.until(lambda: page.driver.execute_script(script) == what, f"focus on {what}", 10)


def test_a_change_is_looked_at_before_it_is_saved_and_taken_back_in_the_history(settings: Page, dev: OnTerminal) -> None:
    page, before = settings, newest(dev.admin)["version"]
    page.fill("input[type=search]", "messages")
    page.sees("1 of ", ".page-tools .count")
    assert "default" in page.text(line(LIMIT))
    page.fill(at(LIMIT), "3")
    page.sees("changed, not saved", line(LIMIT))
    page.sees("1 unsaved change", ".draft")
    page.button("Review").click()
    page.sees("1 change to version", ".review")
    row = page.text(".review tbody tr")
    assert [part in row for part in (LIMIT, "2048", "3", "at once")] == [True] * 4, row
    assert newest(dev.admin)["version"] == before
    page.fill("#reason", "no long talks")
    page.button("Save").click()
    page.sees(f"Saved as version {before + 1}", ".notes")
    page.sees(f"Version {before + 1}", ".standing")
    page.sees("from the document", line(LIMIT))
    assert not page.all(".draft")
    now = newest(dev.admin)
    assert (now["document"], now["reason"]) == ({"guard": {"max_messages": 3}}, "no long talks")
    page.go("settings", "history")
    page.sees("no long talks", "tbody")
    page.button(f"Roll back to version {before}").click()
    page.sees(f"Back to version {before}: 1 change", ".review")
    assert newest(dev.admin)["version"] == before + 1
    page.button("Roll back").click()
    page.sees(f"Version {before + 2} now says what version {before} said", ".notes")
    page.sees(f"back to version {before}", "tbody")
    assert newest(dev.admin)["document"] == {}


@pytest.mark.skipif(importlib.util.find_spec("llmgw.router.gate") is None, reason="this build's router has no gate")
def test_a_limit_set_in_the_form_holds_within_a_second_and_no_longer_once_it_is_rolled_back(settings: Page, dev: OnTerminal) -> None:
    page, address = settings, f"127.0.0.1:{dev.port}"
    dev.apply("m1")
    dev.admin.wait_ready("m1")
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    def asked() -> tuple[int, Any]:
        return call(address, "POST", "/v1/chat/completions", {"model": "m1", "messages": two, "max_tokens": 2})

    try:
        assert asked()[0] == 200
        page.fill(at(LIMIT), "1")
        page.button("Review").click()
        page.button("Save").click()
        page.sees("It takes effect within a second", ".notes")
        wait_for(lambda: asked()[0] == 400, "the limit holds", 1.0)
        assert asked()[1]["error"]["param"] == "messages"
        assert chat(address, "m1", max_tokens=2)[0] == 200
        page.go("settings", "history")
        page.button(f"Roll back to version {newest(dev.admin)['parent']}").click()
        page.sees("Back to version", ".review")
        page.button("Roll back").click()
        page.sees("now says what version", ".notes")
        wait_for(lambda: asked()[0] == 200, "it does not hold any more", 1.0)
    finally:
        dev.admin("DELETE", "/models/m1", **{"if-match": "*"})


def test_a_wrong_value_is_told_at_its_key_and_changes_nothing(settings: Page, dev: OnTerminal) -> None:
    page, before = settings, newest(dev.admin)["version"]
    page.fill(at(LIMIT), "-1")
    page.sees("must be at least 0", line(LIMIT))  # before anybody was asked
    page.fill(at("reconcile.node_lost_after_s"), "5")  # what only the server knows: it contradicts another key
    page.fill("input[type=search]", "placement")  # a fault is found also where a search hides its key
    page.button("Review").click()
    page.sees("2 faults: nothing was saved", ".faults")
    page.sees("must be between 0 and", line(LIMIT))
    page.sees("at least three times heartbeat_s", line("reconcile.node_lost_after_s"))
    assert page.one(at(LIMIT)).get_attribute("aria-invalid") == "true"
    focused(page, "key-reconcile.node_lost_after_s")
    page.fill(at("reconcile.node_lost_after_s"), "99")
    page.until(lambda: "heartbeat_s (" not in page.text(line("reconcile.node_lost_after_s")), "the fault goes when the key is changed")
    page.fill(at(LIMIT), "many")
    page.button("Review").click()
    page.sees("1 fault", ".faults")
    page.sees("expected a whole number", f"{line(LIMIT)} .key-fault")
    assert value(page, at(LIMIT)) == "many"
    press(page, f"Undo the change of {LIMIT}")
    assert value(page, at(LIMIT)) == "2048"
    page.button("Review").click()
    page.sees("1 change to", ".review")
    page.button("Back to editing").click()
    page.button("Discard").click()
    page.button("Yes, discard").click()
    assert value(page, at("reconcile.node_lost_after_s")) == "30"
    assert newest(dev.admin)["version"] == before


def test_edits_go_with_whoever_edits_from_the_form_to_the_text_and_back(settings: Page, dev: OnTerminal) -> None:
    page = settings
    page.fill(at("route.retries"), "2")
    page.fill(at("reconcile.restart_backoff_s"), "1\n2.5")
    page.go("settings", "toml")
    page.until(
        lambda: value(page, "#toml") == "[reconcile]\nrestart_backoff_s = [\n    1,\n    2.5,\n]\n\n[route]\nretries = 2\n",
        "the form's edits as text",
    )
    page.one("#toml").send_keys(Keys.CONTROL, Keys.END)
    page.one("#toml").send_keys('[engines."llama.cpp"]\nload_limit_s = 7\n')
    page.go("overview")
    page.go("settings")
    page.sees('engines."llama.cpp".load_limit_s', "main")
    assert value(page, "[id='key-engines.\"llama.cpp\".load_limit_s']") == "7"
    assert value(page, at("route.retries")) == "2"
    page.sees("3 unsaved changes", ".draft")
    page.go("settings", "toml")
    page.one("#toml").send_keys(Keys.CONTROL, Keys.END)
    page.one("#toml").send_keys("oops\n")
    page.go("settings")
    page.sees("the form cannot show them", "main")
    page.go("settings", "toml")
    assert "oops" in (value(page, "#toml") or "")
    page.button("Review").click()
    page.sees("at line 12", "main")
    assert [one.text for one in page.all(".numbers .at-fault")] == ["12"]
    page.one("#toml").send_keys(Keys.CONTROL, Keys.END)
    page.one("#toml").send_keys(Keys.BACKSPACE * 5, "[guard]\nmax_message = 1\n")
    page.button("Review").click()
    page.sees("did you mean", ".faults")
    assert [one.text for one in page.all(".numbers .at-fault")] == ["13"]
    page.one("#toml").send_keys(Keys.CONTROL, Keys.END)
    page.one("#toml").send_keys(Keys.BACKSPACE * len("max_message = 1\n"), "max_messages = 1\n")
    page.button("Review").click()
    page.sees("4 changes to version", ".review")
    page.button("Save").click()
    page.sees("Saved as version", ".notes")
    assert newest(dev.admin)["document"] == {
        "reconcile": {"restart_backoff_s": [1, 2.5]},
        "route": {"retries": 2},
        "guard": {"max_messages": 1},
        "engines": {"llama.cpp": {"load_limit_s": 7}},
    }
    assert value(page, "#toml") == newest(dev.admin)["toml"]


def test_what_the_form_writes_as_text_the_server_reads_as_the_same(settings: Page, dev: OnTerminal) -> None:
    words = ['"quoted"', "back\\slash \\n", "tab\tand\u0085", "turned \u202e around", "\U0001f600", "# no comment", "[x]", "'", " x"]
    document = {
        "reconcile": {"tick_s": 0.25, "restart_backoff_s": [0.5, 1e3], "brake": {"share": 1}},
        "guard": {"max_images": 0, "rule": [{"name": "a.b", "match": "\\b[0-9]{16}\\b", "words": words}, {"name": "c", "words": ["x"]}]},
        "engines": {"llama.cpp": {"command": ["/x", ""]}, "vllm": {"load_limit_s": 1e5}},
        "auth": {"required": False},
    }
    write(dev.admin, document=document)
    stored = newest(dev.admin)
    text = settings.driver.execute_async_script(
        "const [values, done] = arguments;"
        "import(new URL('settings_document.js', document.baseURI))"
        ".then((module) => done(module.toml(values, () => 0)), (err) => done(String(err)))",
        stored["document"],
    )
    checked = dev.admin("POST", "/settings/check", {"toml": text})
    assert (checked["changes"], checked["sha256"]) == ([], stored["sha256"]), text


def test_edits_outlive_a_session_that_ends_and_not_a_sign_out(settings: Page, dev: OnTerminal) -> None:
    page = settings
    page.fill(at("route.retries"), "2")
    page.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    page.sees("Your session has ended")
    page.one("#token").send_keys(dev.token, Keys.ENTER)
    page.until(lambda: value(page, at("route.retries")) == "2", "the edit is still there")
    page.button("Sign out").click()
    page.sees("You have signed out")
    page.one("#token").send_keys(dev.token, Keys.ENTER)
    page.until(lambda: value(page, at("route.retries")) == "1", "nothing is left of it")
    assert not page.all(".draft")


def test_rules_and_engines_are_rows_that_are_added_changed_and_taken_away(settings: Page, dev: OnTerminal) -> None:
    page = settings
    press(page, "Add a rule")
    focused(page, "key-guard.rule[0].name")
    page.button("Review").click()
    page.sees("must not be empty", line("guard.rule[0]"))
    page.fill(at("guard.rule[0].name"), "names")
    page.fill(at("guard.rule[0].words"), "Ada\nGrace Hopper")
    choose(page, at("guard.rule[0].action"), "flag")
    press(page, "Add a rule")
    page.fill(at("guard.rule[1].name"), "places")
    page.fill(at("guard.rule[1].words"), "Kew")
    press(page, "Move places up")
    page.fill(".controls .engine", "vllm")
    press(page, "Set keys for it")
    page.fill(at("engines.vllm.command"), "/opt/vllm/bin/vllm\n--x")
    page.button("Review").click()
    page.sees("2 changes to version", ".review")
    page.button("Save").click()
    page.sees("Saved as version", ".notes")
    names = {"name": "names", "words": ["Ada", "Grace Hopper"], "action": "flag"}
    assert newest(dev.admin)["document"] == {
        "guard": {"rule": [{"name": "places", "words": ["Kew"]}, names]},
        "engines": {"vllm": {"command": ["/opt/vllm/bin/vllm", "--x"]}},
    }
    press(page, "Remove places")
    press(page, "engines.vllm.command: back to its default")
    page.button("Review").click()
    page.sees("2 changes to version", ".review")
    page.sees("Kew", ".review")
    assert "Hopper" not in page.text(".review"), "only the rule that goes is shown"
    page.button("Save").click()
    page.sees("Saved as version", ".notes")
    assert newest(dev.admin)["document"] == {"guard": {"rule": [names]}}


def choose(page: Page, css: str, option: str) -> None:
    page.driver.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))", page.one(css), option
    )


@pytest.mark.parametrize("view", ["", "toml"])
def test_of_two_tabs_that_edit_the_slower_one_sees_what_changed_and_keeps_its_edits(settings: Page, dev: OnTerminal, view: str) -> None:
    page, before = settings, newest(dev.admin)["version"]
    first = page.driver.current_window_handle

    def edit(key: str, number: str) -> None:
        if view:
            page.go("settings", view)
            table, _, name = key.partition(".")
            page.one("#toml").send_keys(f"[{table}]\n{name} = {number}\n")
        else:
            page.one(at(key)).click()  # a window that was just opened has no focus to type at
            page.fill(at(key), number)
        page.button("Review").click()
        page.sees(key, ".review")

    edit("route.retries", "2")
    page.driver.switch_to.new_window("window")
    page.driver.get(f"{dev.url}#/settings")
    page.sees("keys", ".page-tools .count")
    edit("guard.max_images", "5")
    page.fill("#reason", "fewer pictures")
    page.button("Save").click()
    page.sees(f"Saved as version {before + 1}", ".notes")
    page.driver.switch_to.window(first)
    page.button("Save").click()
    page.sees("was faster", "[role=alert]")
    page.sees(f"What changed meanwhile: version {before + 1}", "main")
    page.sees("fewer pictures", "main")
    assert "guard.max_images" in page.text('[aria-label^="What changed meanwhile"]')
    assert newest(dev.admin)["version"] == before + 1
    rows = [one.text for one in page.all(".review tbody tr")]
    assert len(rows) == 1
    assert "route.retries" in rows[0], "its own change alone, on the newest version"
    page.button("Save").click()
    page.sees(f"Saved as version {before + 2}", ".notes")
    assert newest(dev.admin)["document"] == {"route": {"retries": 2}, "guard": {"max_images": 5}}


def test_a_newer_version_is_told_while_somebody_edits_and_a_key_that_both_changed_is_marked(settings: Page, dev: OnTerminal) -> None:
    page = settings
    page.fill(at("route.retries"), "2")
    write(dev.admin, "PATCH", set={"route.retries": 3, "guard.max_images": 1}, reason="theirs")
    page.sees("was saved while you were editing", ".meanwhile")
    assert value(page, at("route.retries")) == "2"
    page.button("Review").click()
    page.sees("changed by others too", ".review")
    assert page.text(".review").count("changed by others too") == 1
    page.button("Back to editing").click()
    press(page, "Undo the change of route.retries")
    assert value(page, at("route.retries")) == "3"


def test_a_save_that_nobody_answered_is_asked_for_again_and_done_once(settings: Page, dev: OnTerminal) -> None:
    page, before = settings, newest(dev.admin)["version"]
    page.fill(at("route.retries"), "2")
    page.button("Review").click()
    page.button("Save")
    page.driver.execute_script(
        "const real = window.fetch; window.fetch = async (...all) => { const answer = await real(...all);"
        "if (all[1]?.method === 'PATCH') { window.fetch = real; throw new TypeError('cut') } return answer }"
    )
    page.button("Save").click()
    page.sees("not known whether this was saved", "[role=alert]")
    page.button("Save").click()
    page.sees(f"Saved as version {before + 1}", ".notes")
    assert newest(dev.admin)["version"] == before + 1


def test_the_keyboard_alone_changes_a_setting(settings: Page, dev: OnTerminal) -> None:
    page = settings

    def keys(*typed: str) -> None:
        page.driver.switch_to.active_element.send_keys(*typed)

    def tab_to(what: str, limit: int = 40) -> None:
        script = "const a = document.activeElement; return [a.id, a.textContent, a.type]"
        for _ in range(limit):
            keys(Keys.TAB)
            if what in page.driver.execute_script(script):
                return
        raise AssertionError(f"no way to {what}")

    page.driver.execute_script("document.getElementById('main').focus()")
    tab_to("search")
    keys("route.retries")
    page.sees("1 of ", ".page-tools .count")
    tab_to("key-route.retries")
    keys(Keys.CONTROL, "a")
    keys("4", Keys.ENTER)  # Enter in a field asks for the review
    focused(page, "Review")
    keys(Keys.ESCAPE)
    page.sees("1 unsaved change", ".draft")
    page.driver.execute_script("document.getElementById('main').focus()")
    tab_to("Review")
    keys(Keys.ENTER)
    focused(page, "Review")
    tab_to("reason")
    keys("by hand", Keys.ENTER)
    page.sees("Saved as version", ".notes")
    focused(page, "notes")
    assert newest(dev.admin)["document"] == {"route": {"retries": 4}}


def test_a_pause_is_made_with_a_reason_told_and_ended(settings: Page, dev: OnTerminal) -> None:
    page = settings
    page.go("settings", "rollout")
    page.sees("in force", "tbody")
    page.fill(".controls.pause input", "moving house")
    page.button("Pause").click()
    page.button("Yes, pause").click()
    try:
        page.sees("moving house", ".standing")
        assert dev.admin("GET", "/pause")["pause"]["reason"] == "moving house"
        page.button("Resume").click()
        page.until(lambda: dev.admin("GET", "/pause")["pause"] is None, "the pause is over")
        page.sees("in force", ".standing")
    finally:
        dev.admin("DELETE", "/pause")


def test_a_roll_out_that_has_stopped_says_who_refused_what_and_why(settings: Page, dev: OnTerminal) -> None:
    page, version = settings, newest(dev.admin)["version"]
    write(dev.admin, toml="[route]\nretries = 2\n")
    page.driver.execute_script(
        """const [version, real] = [arguments[0], window.fetch], next = version + 1, why = "no such folder";
        const rollout = { phase: "frozen", version: next, token: "", reason: `version was stopped at ctl-2: ${why}`, waiting: "" };
        const stopped = (found) => {
          const [me] = found.control_planes;
          const two = { ...me, name: "ctl-2", address: "http://two", leads: false, me: false, heard_s: 1, refused: next, why };
          const planes = [{ ...me, pending: next, applied: version }, two];
          return { ...found, held: true, why_held: why, desired: version, rollout, control_planes: planes };
        };
        window.fetch = async (url, ...more) => {
          const answer = await real(url, ...more);
          return String(url).endsWith("/api/v1/settings") ? new Response(JSON.stringify(stopped(await answer.json()))) : answer;
        };""",
        version,
    )
    page.go("settings", "rollout")
    page.sees("frozen", ".standing")
    page.sees("version was stopped at ctl-2: no such folder", ".standing")
    rows = [one.text for one in page.all("tbody tr")]
    assert len(rows) == 2
    assert [part in rows[0] for part in ("waiting", f"version {version + 1} loads here; the roll-out has stopped")] == [True, True], rows
    assert [part in rows[1] for part in ("ctl-2", "refused", f"version {version + 1} is not taken here: no such folder")] == [True] * 3, (
        rows
    )
    page.go("settings", "history")
    page.sees("ctl-2: no such folder", "tbody")


def test_any_two_versions_are_compared(settings: Page, dev: OnTerminal) -> None:
    page, first = settings, newest(dev.admin)["version"]
    write(dev.admin, toml="[route]\nretries = 2\n")
    write(dev.admin, toml="[route]\nretries = 2\n[lease]\nttl_s = 20\n", reason=HOSTILE)
    page.go("settings", "history")
    page.sees(HOSTILE, "tbody")
    page.button(f"Changes of version {first + 2}").click()
    page.sees(f"From version {first + 1} to version {first + 2}", "main")
    panel = "[aria-label=Comparison]"
    assert "lease.ttl_s" in page.text(panel)
    assert "restart" in page.text(panel)
    assert "route.retries" not in page.text(panel)
    selects = page.all(".panel-head select")
    for select, version in zip(selects, (first, first + 2), strict=True):
        page.driver.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", select, str(version)
        )
    page.button("Show").click()
    page.sees("route.retries", panel)
    page.sees("lease.ttl_s", panel)
    assert not page.all("[onerror]")
    page.go("settings")
    page.until(lambda: page.all(at("lease.ttl_s")), "the form")
    write(dev.admin, toml="", reset=True)


@pytest.mark.parametrize("width", [1280, 400])
def test_settings_are_no_wider_than_their_window(settings: Page, dev: OnTerminal, width: int) -> None:
    page = settings
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    rule = {"name": "n" * 128, "words": ["w" * 300]}
    url = f"https://{'h' * 60}.example/{'p' * 200}"
    write(dev.admin, document={"guard": {"rule": [rule]}, "notify": {"url": url}}, reason="r" * 300)

    def fits(what: str) -> None:
        sizes = page.driver.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert sizes[0] <= sizes[1], what

    for view, css in (("", at("guard.rule[0].name")), ("toml", "#toml"), ("history", "tbody"), ("rollout", "tbody")):
        page.go("settings", *([view] if view else []))
        page.one(css)
        fits(view)
    page.go("settings")
    press(page, f"Remove {'n' * 128}")
    page.fill(at("notify.url"), "x" * 200)
    fits("edited")
    page.button("Review").click()
    page.sees("fault", ".faults")
    fits("faults")
    press(page, "notify.url: back to its default")
    page.button("Review").click()
    page.sees("2 changes", ".review")
    fits("review")


async def test_a_viewer_sees_everything_and_can_change_nothing(page: Page, tmp_path: Path) -> None:
    async with running_admin(tmp_path) as admin:
        page_works = partial(look_as_a_viewer, page, f"http://127.0.0.1:{admin.port}/console/")
        await trio.to_thread.run_sync(page_works)


def look_as_a_viewer(page: Page, url: str) -> None:
    page.open(url)
    page.one("#token").send_keys(VIEWER, Keys.ENTER)
    page.sees("Overview", "h1")
    page.go("settings")
    page.sees("You have signed in as a viewer", ".read-only")
    assert value(page, at("route.retries")) == "1"
    assert page.all(".settings :is(input, select, textarea):disabled")
    assert not page.all(".settings :is(input, select, textarea):enabled")
    page.go("settings", "toml")
    assert page.one("#toml").get_attribute("readonly") is not None
    page.go("settings", "history")
    page.sees("You have signed in as a viewer", ".read-only")
    page.one("tbody tr")
    page.go("settings", "rollout")
    page.sees("in force", "tbody")
    assert not page.button("Pause").is_enabled()


class Server:
    """A control plane of its own. `tables` is the rest of its file."""

    def __init__(self, folder: Path, name: str, tables: str) -> None:
        self.port = free_port()
        self.file, self._data_dir = folder / f"{name}.toml", folder / name
        self.file.write_text(f'[server]\nname = "{name}"\ndata_dir = "{self._data_dir}"\nadmin_listen = "127.0.0.1:{self.port}"\n{tables}')
        self.process = Program(["server", "--config", str(self.file)], folder, name)
        self.url = f"http://127.0.0.1:{self.port}/console/"

    @property
    def token(self) -> str:
        return (self._data_dir / "admin-token").read_text().strip()

    def wait_ready(self) -> None:
        wait_for(lambda: answers(self.port), "a start")


def test_without_a_store_the_form_is_read_only_and_names_the_file(page: Page, tmp_path: Path) -> None:
    server = Server(tmp_path, "alone", f'[router]\nlisten = "127.0.0.1:{free_port()}"\n[route]\nretries = 7\n')
    try:
        server.wait_ready()
        page.open(f"{server.url}#/settings")
        page.one("#token").send_keys(server.token, Keys.ENTER)
        page.sees(f"Without [store] the settings stand in {server.file}", ".read-only")
        assert value(page, at("route.retries")) == "7"
        assert "from the file" in page.text(line("route.retries"))
        assert not page.one(at("route.retries")).is_enabled()
        assert not page.all(".rule"), "what is not in force is not shown as if it were"
        page.go("settings", "history")
        page.sees(str(server.file), "main")
    finally:
        server.process.close()


def test_a_roll_out_over_two_control_planes_is_followed_on_the_page(page: Page, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    tables = (
        f'[store]\npath = "{tmp_path}/shared/llmgw.db"\n[router]\nembedded = false\n'
        "[lease]\nttl_s = 3\nrenew_s = 1\npoll_s = 0.5\n[rollout]\nleader_delay_s = 5\n"
    )
    servers = []
    try:
        for name in ("ctl-a", "ctl-b"):  # the first to be ready leads
            servers.append(Server(tmp_path, name, tables))
            servers[-1].wait_ready()
        page.open(f"{servers[1].url}#/settings")
        page.one("#token").send_keys(servers[1].token, Keys.ENTER)
        page.fill(at("lease.ttl_s"), "4")
        page.button("Review").click()
        page.sees("Control planes restart one after another for lease.ttl_s", ".review")
        page.button("Save").click()
        page.sees("Saved as version 2", ".notes")
        page.go("settings", "rollout")
        page.sees("rolling out", ".standing")
        page.sees("Your session has ended")  # the standby is the first, and it is the one that serves this page
        page.one("#token").send_keys(servers[1].token, Keys.ENTER)
        page.sees("2 of 2 control planes run version 2", ".standing", 90)
        rows = [one.text for one in page.all("tbody tr")]
        assert ["leads" in row and "in force" in row for row in rows] == [False, True], rows
        page.go("settings", "history")
        page.sees("ctl-a, ctl-b", "tbody")
    finally:
        for server in servers:
            server.process.end()
            server.process.close()


def answers(port: int) -> bool:
    try:
        return call(f"127.0.0.1:{port}", "GET", "/ready")[0] == 200
    except OSError:
        return False
