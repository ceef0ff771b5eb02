"""The console in a real Chromium, in front of a real `llmgw dev` (case T43: hostile names, a path of a proxy, eight tabs)."""

from __future__ import annotations

import json
import os
import signal
import sys
from urllib.parse import quote

import pytest
from selenium.webdriver.common.keys import Keys

from tests.programs import call, wait_for

from .conftest import HOSTILE, OnTerminal, Page
from .proxy import stripping_proxy

pytestmark = pytest.mark.slow


def test_the_link_of_dev_signs_in_once_and_leaves_no_trace(dev: OnTerminal, page: Page) -> None:
    link = dev.link()
    page.open(link)
    page.sees("Overview", "h1")
    assert "link=" not in page.driver.current_url
    page.button("Sign out").click()
    page.sees("You have signed out")
    page.open(link)
    page.sees("used already")
    assert not page.all("nav")


def test_a_wrong_token_is_told_and_the_right_one_signs_in_and_lasts_over_a_reload(dev: OnTerminal, page: Page) -> None:
    page.open(dev.url)
    page.one("#token").send_keys("wrong" * 8)
    page.button("Sign in").click()
    page.sees("not valid", "[role=alert]")
    page.sign_in(dev)
    cookie = page.driver.get_cookies()[0]
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert "expiry" not in cookie
    page.driver.refresh()
    page.sees("Overview", "h1")


def test_a_killed_engine_shows_without_a_reload(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    page.sees("Live", ".fresh")
    page.driver.execute_script("window.same = true")
    one = dev.admin.wait_ready("m1", 2)[0]
    os.kill(one["pid"], signal.SIGKILL)
    page.until(lambda: "replica.crashed" in page.text(".events"), "the crash among the events")
    page.go("replicas", one["id"])
    page.sees("replica.crashed", ".events")
    page.until(lambda: "Attempt\n2" in page.text(".facts") and "ready" in page.text(".facts"), "it is ready again on its second attempt")
    assert page.driver.execute_script("return window.same")


def test_a_chat_appears_token_by_token_and_stop_ends_it(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    page.go("playground")
    page.one("#draft").send_keys("hello", Keys.ENTER)
    page.driver.execute_script(
        "window.sizes = new Set(); window.look = setInterval(() => {"
        "const said = document.querySelector('.turn.assistant .said'); if (said) window.sizes.add(said.textContent.length) }, 20)"
    )
    page.until(lambda: page.driver.execute_script("return window.sizes.size") > 10, "many lengths of the answer")
    page.button("Stop").click()
    page.sees("stopped", ".turn .note")
    length = page.driver.execute_script("return document.querySelector('.turn.assistant .said').textContent.length")
    assert length > 20
    wait_for(lambda: all(row["running"] in (0, None) for row in dev.admin.replicas("m1")), "the engine is let go")
    page.fill(".fields input[type=number]", "20")
    page.one("#draft").send_keys("again", Keys.ENTER)
    page.until(lambda: page.text(".turn .note").count("first token after") == 2, "the whole answer", 60)
    turns = [one.text for one in page.all(".turn")]
    assert len(turns) == 4
    assert "/19" in turns[3]
    assert "limit of tokens" not in turns[3]


def test_what_a_stranger_wrote_is_shown_as_text_and_runs_nothing(dev: OnTerminal, page: Page) -> None:
    dev.apply(HOSTILE)
    (row,) = dev.admin.wait_ready(HOSTILE)
    try:
        page.sign_in(dev)
        page.driver.execute_script("window.alert = () => { window.ran = true }")
        for place in (
            ["overview"],
            ["models"],
            ["models", HOSTILE],
            ["replicas"],
            ["replicas", row["id"]],
            ["playground"],
            ["events"],
            ["nodes"],
        ):
            page.go(*place)
            page.until(lambda: page.all("h1"), "a page")
            if place != ["nodes"]:
                page.sees(HOSTILE)
            assert not page.all("[onerror]")
            assert page.driver.execute_script("return document.querySelectorAll('img[src=x]').length") == 0
        page.go("replicas", row["id"])
        page.sees(HOSTILE, ".log")
        page.go("playground")
        page.driver.execute_script(
            "const s = document.getElementById('model'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", HOSTILE
        )
        page.one("#draft").send_keys(HOSTILE, Keys.ENTER)
        page.sees(HOSTILE, ".turn.user .said")
        page.button("Stop").click()
        assert not page.all("[onerror]")
        assert page.driver.execute_script("return window.ran") is None
        assert (
            page.driver.execute_script("try { document.body.innerHTML = '<b></b>'; return 'taken' } catch { return 'refused' }")
            == "refused"
        )
    finally:
        dev.admin("DELETE", f"/models/{quote(HOSTILE)}", **{"if-match": "*"})


@pytest.mark.parametrize("prefix", ["/llmgw", "/a/b/llmgw"])
def test_below_a_path_every_request_stays_there(dev: OnTerminal, page: Page, prefix: str) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", prefix) as proxy:
        for ending in ("", "/", "/console", "/console/"):
            page.open("about:blank")
            page.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
            page.sign_in(dev, f"http://{proxy.address}{prefix}{ending}")
            assert page.driver.current_url.startswith(f"http://{proxy.address}{prefix}/console/")
        page.sees("Live", ".fresh")
        (first, *_) = dev.admin.replicas("m1")
        for place in (["models", "m1"], ["replicas", first["id"]], ["nodes"], ["events"]):
            page.go(*place)
            page.until(lambda: page.all("main .panel"), "a page")
        page.go("replicas", first["id"])
        page.sees("line", ".log")
        page.go("models", "m1")
        page.button("Restart").click()
        page.button("No").click()
        page.go("playground")
        page.one("#draft").send_keys("hello", Keys.ENTER)
        page.until(lambda: "/5 " in page.text(".turn.assistant .said"), "tokens")
        page.button("Stop").click()
        refused = [one for one in proxy.seen if one[2] >= 400 and one[:2] != ("GET", f"{prefix}/session")]
        page.button("Sign out").click()
        page.sees("You have signed out")
        kinds = {path.split("?")[0].removeprefix(prefix) for _, path, _ in proxy.seen}
        outside = [one for one in proxy.seen if not f"{one[1]}/".startswith(f"{prefix}/")]
    assert not outside
    assert not refused
    assert {"/console/app.js", "/console/style.css", "/api/v1/status", "/api/v1/events", "/console/v1/chat/completions"} <= kinds


def test_eight_tabs_update_with_one_stream_between_them(dev: OnTerminal, page: Page) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", "/p") as proxy:
        page.sign_in(dev, f"http://{proxy.address}/p/")
        for _ in range(7):
            page.driver.switch_to.new_window("window")
            page.driver.get(f"http://{proxy.address}/p/console/")
            page.sees("Overview", "h1")
        handles = page.driver.window_handles
        assert len(handles) == 8

        def roles() -> list[str]:
            found = []
            for handle in handles:
                page.driver.switch_to.window(handle)
                found += [one.get_attribute("data-role") or "" for one in page.all(".fresh.live")]
            return sorted(found)

        page.until(lambda: roles() == ["follower"] * 7 + ["leader"], "one leading tab, seven that hear from it")
        dev.admin("POST", "/nodes/dev/cordon")
        try:
            for handle in handles:
                page.driver.switch_to.window(handle)
                page.sees("cordoned", "main")
        finally:
            dev.admin("POST", "/nodes/dev/resume")
        for handle in handles:
            page.driver.switch_to.window(handle)
            page.until(lambda: "cordoned" not in page.text("table"), "the node is ready again")
        streams = [one for one in proxy.seen if one[1].startswith("/p/api/v1/events") and "limit" not in one[1]]
        # each tab may lead for a moment while it is the only one to be seen; never two at a time, which the lock holds
        assert 1 <= len(streams) <= 10
        page.driver.switch_to.window(next(handle for handle in handles if is_leader(page, handle)))
        page.driver.close()
        handles.remove(next(handle for handle in handles if handle not in page.driver.window_handles))
        page.until(lambda: roles() == ["follower"] * 6 + ["leader"], "another tab leads when the first is closed")
        page.driver.switch_to.window(handles[0])
        page.button("Sign out").click()
        for handle in handles:
            page.driver.switch_to.window(handle)
            page.sees("Admin token")


def test_a_hidden_tab_gives_up_its_stream_and_takes_up_again_when_it_is_seen(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    page.until(lambda: is_leader(page, page.driver.current_window_handle), "the only tab leads")
    hide = (
        "Object.defineProperty(document, 'hidden', {get: () => window.unseen, configurable: true});"
        "window.unseen = arguments[0]; document.dispatchEvent(new Event('visibilitychange'))"
    )
    sources = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/v1/status')).length"
    page.driver.execute_script(hide, True)
    assert page.driver.execute_script("return navigator.locks.query().then((all) => all.held.length + all.pending.length)") == 0
    before = page.driver.execute_script(sources)
    dev.admin("POST", "/nodes/dev/cordon")
    dev.admin("POST", "/nodes/dev/resume")
    wait_for(lambda: dev.admin.events("node.resumed"), "the events of it")
    assert page.driver.execute_script(sources) == before
    page.driver.execute_script(hide, False)
    page.until(lambda: page.driver.execute_script(sources) > before, "it reads again")
    page.sees("Live", ".fresh")
    page.sees("node.resumed", ".events")


def is_leader(page: Page, handle: str) -> bool:
    page.driver.switch_to.window(handle)
    return bool(page.all(".fresh[data-role=leader]"))


def test_a_log_follows_its_end_pauses_when_scrolled_up_and_never_shows_another_replica(dev: OnTerminal, page: Page) -> None:
    first, second = dev.admin.wait_ready("m1", 2)
    ports = {one["id"]: one["url"].rpartition(":")[2] for one in (first, second)}
    page.sign_in(dev)
    page.go("replicas", first["id"])
    page.sees(f"of {ports[first['id']]}", ".log")
    assert "[32m" not in page.text(".log")

    def at_end() -> bool:
        script = "const p = document.querySelector('.log'); return [p.scrollHeight, p.scrollTop, p.clientHeight]"
        whole, above, seen = page.driver.execute_script(script)
        return whole > seen and whole - above - seen < 8

    page.until(at_end, "the end of the log is shown", 60)
    page.driver.execute_script("document.querySelector('.log').scrollTop = 0")
    page.sees("Paused", ".log-state")
    before = len(page.text(".log"))
    page.until(lambda: len(page.text(".log")) > before + 200, "the log goes on")
    assert page.driver.execute_script("return document.querySelector('.log').scrollTop") == 0
    page.button("Go to the end").click()
    page.until(at_end, "it follows again")
    for turn in range(6):  # quickly from one to the other
        one, other = (second, first) if turn % 2 == 0 else (first, second)
        page.go("replicas", one["id"])
        page.until(lambda: f"of {ports[one['id']]}" in page.text(".log"), "its own lines")  # noqa: B023 - used at once
        assert f"of {ports[other['id']]}" not in page.text(".log")


def test_old_data_is_called_old(dev: OnTerminal, page: Page) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", "/p") as proxy:
        page.sign_in(dev, f"http://{proxy.address}/p/")
        page.sees("Live", ".fresh")
        # a backend that takes connections and says nothing, as a suspended machine does
        os.kill(dev.process.pid, signal.SIGSTOP)
        try:
            page.sees("Not updated since", "[role=alert]", 60)
        finally:
            os.kill(dev.process.pid, signal.SIGCONT)
        page.until(lambda: "Not updated since" not in page.text() and "Live" in page.text(".fresh"), "it is fresh again", 60)


def test_a_short_interruption_is_told_at_once_and_is_over_when_answers_come_again(dev: OnTerminal, page: Page) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", "/p") as proxy:
        page.sign_in(dev, f"http://{proxy.address}/p/")
        page.until(lambda: page.text(".fresh") == "Live", "it is live")
        proxy.cut = "/api/v1/(status|replicas|models|nodes)"  # and the stream of events lives on
        page.sees("Interrupted", ".fresh", 14)  # before the page is called old
        assert not page.all(".stale")
        proxy.cut = ""
        page.until(lambda: page.text(".fresh") == "Live", "it is live again", 14)


def test_while_nobody_answers_the_page_never_says_live(dev: OnTerminal, page: Page) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", "/p") as proxy:
        proxy.cut = r"/api/v1/events(\?after|$)"  # the stream, which is tried again every few seconds
        page.sign_in(dev, f"http://{proxy.address}/p/")
        page.sees("Live every 5 s", ".fresh")
        proxy.cut = "/api/"
        page.sees("Interrupted", ".fresh", 14)
        page.driver.execute_script(
            "window.told = new Set(); const look = () => window.told.add(document.querySelector('.fresh')?.innerText);"
            "look(); new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true})"
        )
        begun = len(proxy.seen)
        page.until(lambda: len([one for one in proxy.seen[begun:] if "/events?after" in one[1]]) >= 3, "three tries of the stream")
        assert {text for text in page.driver.execute_script("return [...window.told]") if text} == {"Interrupted, trying again"}


def test_a_slow_link_does_not_make_fresh_data_old(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    page.sees("Live", ".fresh")
    readings = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/v1/replicas')).length"
    page.driver.execute_script(
        "window.old = [];"
        "setInterval(() => { const told = document.querySelector('.stale'); if (told) window.old.push(told.textContent) }, 100)"
    )
    page.driver.execute_cdp_cmd("Network.enable", {})
    slow = {"offline": False, "latency": 0, "downloadThroughput": 1_000, "uploadThroughput": 100_000}  # a reading takes seconds
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
    before = page.driver.execute_script(readings)
    page.until(
        lambda: page.driver.execute_script(readings) >= before + 4 or page.driver.execute_script("return window.old.length"),
        "four readings",
        90,
    )
    assert page.driver.execute_script("return window.old") == []


def test_signing_out_forgets_the_chat_and_the_key(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    page.go("playground")
    page.one("#draft").send_keys("my question", Keys.ENTER)
    page.sees("my question", ".turn.user")
    page.button("Stop").click()
    page.fill(".fields input[type=password]", "sk-secret")
    page.fill("#draft", "unsent words")
    page.button("Sign out").click()
    page.sees("You have signed out")
    page.one("#token").send_keys(dev.token, Keys.ENTER)
    page.sees("Playground", "h1")
    assert not page.all(".turn")
    assert page.one(".fields input[type=password]").get_attribute("value") == ""
    assert page.one("#draft").get_attribute("value") == ""


def test_a_sign_out_that_nobody_answers_is_not_called_done_and_is_finished_later(dev: OnTerminal, page: Page) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", "/p") as proxy:
        page.sign_in(dev, f"http://{proxy.address}/p/")
        (cookie,) = page.driver.get_cookies()
        first = page.driver.current_window_handle
        page.driver.switch_to.new_window("window")
        page.driver.get(f"http://{proxy.address}/p/console/")
        page.sees("Overview", "h1")
        proxy.cut = "/session"
        page.button("Sign out").click()
        page.sees("could not be ended yet")
        assert "signed out" not in page.text()
        page.driver.switch_to.window(first)
        page.sees("could not be ended yet")
        page.driver.refresh()  # the cookie lives on, and must not let anybody in
        page.sees("could not be ended yet")
        assert not page.all("nav")
        proxy.cut = ""
        page.sees("You have signed out.")
    status, _ = call(f"127.0.0.1:{dev.admin_port}", "GET", "/session", headers={"cookie": f"{cookie['name']}={cookie['value']}"})
    assert status == 401


def test_only_the_other_tabs_say_that_another_tab_signed_out(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("window")
    page.driver.get(dev.url)
    page.sees("Overview", "h1")
    page.driver.execute_script(
        "window.told = new Set();"
        "const seen = new MutationObserver(() => window.told.add(document.body.innerText));"
        "seen.observe(document.body, {subtree: true, childList: true})"
    )
    page.button("Sign out").click()
    page.sees("You have signed out.")
    assert not [text for text in page.driver.execute_script("return [...window.told]") if "in another tab" in text]
    page.driver.switch_to.window(first)
    page.sees("You have signed out in another tab.")


def test_orders_keep_the_keyboards_focus(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    page.go("models", "m1")
    page.sees("Replicas", ".controls")

    def focused(what: str) -> None:
        script = "const a = document.activeElement; return a.getAttribute('aria-label') || a.id || a.innerText"
        page.until(lambda: page.driver.execute_script(script) == what, f"focus on {what}", 10)

    def press(*keys: str) -> None:
        page.driver.switch_to.active_element.send_keys(*keys)

    page.driver.execute_script("arguments[0].focus()", page.button("Restart"))
    press(Keys.ENTER)
    focused("Restart: are you sure?")
    press(Keys.ESCAPE)
    focused("Restart")
    press(Keys.ENTER)
    press(Keys.TAB, Keys.TAB)
    focused("No")
    press(Keys.ENTER)
    focused("Restart")
    page.fill(".controls input", "99")
    press(Keys.ENTER)
    page.sees("must be between", ".controls .told")
    page.fill(".controls input", "3")
    press(Keys.ENTER)
    try:
        page.sees("updated", ".controls .told")
        dev.admin.wait_ready("m1", 3)
        page.fill(".controls input", "2")
        page.driver.execute_script("arguments[0].focus()", page.button("Scale"))
        press(Keys.ENTER)
        dev.admin.wait_ready("m1", 2)
        focused("Scale")
    finally:
        dev.admin("POST", "/models/m1/scale", {"count": 2})
    page.go("nodes")
    page.driver.execute_script("arguments[0].focus()", page.button("Drain dev"))
    press(Keys.ENTER)
    focused("Drain: are you sure?")
    press(Keys.TAB)
    try:
        press(Keys.ENTER)
        focused("main")  # the button has gone with its order
    finally:
        dev.admin("POST", "/nodes/dev/resume")
    dev.admin.wait_ready("m1", 2)


def test_what_a_replicas_page_cannot_know_it_says(dev: OnTerminal, page: Page) -> None:
    with stripping_proxy(f"127.0.0.1:{dev.admin_port}", "/p") as proxy:
        page.sign_in(dev, f"http://{proxy.address}/p/")
        page.go("replicas", "never-there")
        page.sees("There is no such replica, and the history knows of none.", "main")
        assert "gone" not in page.text("main")
        (first, *_) = dev.admin.wait_ready("m1", 2)
        proxy.cut = "/api/v1/explain/"
        page.go("replicas", first["id"])
        page.sees("It cannot be read", "main")
        page.go("models", "never-there")
        page.sees("There is no model of this name.", "main")


def test_the_title_names_the_page_also_after_a_load(dev: OnTerminal, page: Page) -> None:
    page.open(dev.url)
    page.until(lambda: page.driver.title == "Sign in · llmgw", "the title of the way in")
    page.sign_in(dev)
    assert page.driver.title == "Overview · llmgw"
    page.go("models", "m1")
    page.until(lambda: page.driver.title == "m1 · llmgw", "the title of a page")
    page.driver.refresh()
    page.sees("m1", "h1")
    assert page.driver.title == "m1 · llmgw"


def test_codes_of_terminals_do_not_reach_the_page(dev: OnTerminal, page: Page) -> None:
    crash = "print('\\x1b]0;owned\\x07\\x1b[32mgreen\\x1b[0m words', flush=True); raise SystemExit(3)"
    dev.admin.apply({"name": "colours", "profile": [{"engine": "command", "command": [sys.executable, "-c", crash]}]})
    try:
        wait_for(lambda: any("green" in event["text"] for event in dev.admin.events("replica.crashed")), "a crash with its last line")
        page.sign_in(dev)
        for place in (["overview"], ["events"], ["models", "colours"]):
            page.go(*place)
            page.sees("green" if place == ["events"] else "colours", "main")
            text = page.text("main")
            assert not any(code in text for code in ("[32m", "[0m", "owned", "\x1b", "\u241b")), text
    finally:
        dev.admin("DELETE", "/models/colours", **{"if-match": "*"})


def test_the_keyboard_reaches_everything(dev: OnTerminal, page: Page) -> None:
    page.open(dev.url)
    page.one("#token")
    active = page.driver.switch_to.active_element
    assert active.get_attribute("id") == "token"
    active.send_keys(dev.token, Keys.ENTER)
    page.sees("Overview", "h1")
    names = []
    for _ in range(12):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        names.append(page.driver.switch_to.active_element.text)
        if names[-1] == "Replicas":
            break
    assert names[0] == "Skip to the page"
    assert names[1:] == ["Overview", "Models", "Replicas"]
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.sees("Replicas", "h1")
    assert page.driver.switch_to.active_element.get_attribute("id") == "main"


def test_every_control_has_a_name_and_the_page_its_landmarks(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    (first, *_) = dev.admin.replicas("m1")
    settings = (["settings"], ["settings", "toml"], ["settings", "history"], ["settings", "rollout"])
    for place in (
        ["overview"],
        ["models", "m1"],
        ["replicas"],
        ["replicas", first["id"]],
        ["nodes"],
        ["playground"],
        ["events"],
        *settings,
    ):
        page.go(*place)
        page.until(lambda: page.all("main .panel"), "a page")
        unnamed = page.driver.execute_script(
            "const named = (one) => one.hidden || one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length;"
            "const all = document.querySelectorAll('button, input, select, textarea, a');"
            "return [...all].filter((one) => !named(one)).map((one) => one.outerHTML)"
        )
        assert unnamed == []
        assert len(page.all("main")) == len(page.all("header nav")) == len(page.all("main h1")) == 1


@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_its_window(dev: OnTerminal, page: Page, width: int) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    long = "m" * 200
    dev.apply(long, 0)
    page.sign_in(dev)
    page.sees(long)
    (first, *_) = dev.admin.replicas("m1")
    for place in (
        ["overview"],
        ["models"],
        ["models", long],
        ["replicas"],
        ["replicas", first["id"]],
        ["nodes"],
        ["playground"],
        ["events"],
    ):
        page.go(*place)
        page.until(lambda: page.all("main .panel"), "a page")
        sizes = page.driver.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert sizes[0] <= sizes[1], place
    dev.admin("DELETE", f"/models/{long}", **{"if-match": "*"})


def test_orders_from_the_page_are_carried_out(dev: OnTerminal, page: Page) -> None:
    dev.apply("m9", 1)
    dev.admin.wait_ready("m9")
    try:
        page.sign_in(dev)
        page.go("models", "m9")
        page.fill(".controls input", "2")
        page.button("Scale").click()
        page.sees("updated", ".controls .told")
        dev.admin.wait_ready("m9", 2)
        page.sees("2 of 2", ".facts")
        page.go("nodes")
        page.button("Cordon dev").click()
        page.button("Resume dev").click()
        page.button("Cordon dev")
        assert any(event["kind"] == "node.resumed" for event in dev.admin.events("node"))
    finally:
        dev.admin("DELETE", "/models/m9", **{"if-match": "*"})


def test_the_browser_finds_nothing_to_complain_about(dev: OnTerminal, page: Page) -> None:
    page.sign_in(dev)
    for place in ("models", "replicas", "nodes", "settings", "playground", "events"):
        page.go(place)
        page.until(lambda: page.all("main .panel"), "a page")
    for view in ("toml", "history", "rollout"):
        page.go("settings", view)
        page.until(lambda: page.all("main .panel"), "a page")
    page.go("replicas", dev.admin.replicas("m1")[0]["id"])
    for pane, after in ((".log", ["playground"]), (".turns", ["overview"])):
        page.one(pane)
        page.driver.execute_script("window.pane = document.querySelector(arguments[0])", pane)
        page.go(*after)
        page.sees(after[0].capitalize(), "h1")
        page.driver.execute_script("window.pane.dispatchEvent(new Event('scroll'))")  # a browser tells of it when it comes to it
    page.button("Colours: system. Change").click()
    page.button("Colours: light. Change").click()
    assert page.driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
    told = [one for one in page.driver.get_log("browser") if "/session" not in one["message"]]  # 401 before signing in
    assert not told, json.dumps(told)
