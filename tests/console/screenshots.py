"""Writes `docs/screenshots/`: `python -m tests.console.screenshots`. The demo model and a few stand-ins, one page after the other."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.programs import wait_for

from .conftest import ENGINE, OnTerminal, Page, start_browser

TARGET = Path(__file__).parent.parent.parent / "docs" / "screenshots"
ANSWER_S = 60.0
DEMO = "gemma-3-270m"
# A stand-in says this: the demo model is a base model of 270 million weights, whose chats read like nothing.
TALK = (
    (
        "How do I count the lines of a file in Python?",
        "Let Python read it line by line and count:\n\n    with open(path) as file:\n        print(sum(1 for line in file))",
    ),
    ("And without the empty ones?", "Add a condition to the sum:\n\n    sum(1 for line in file if line.strip())"),
)


def table(name: str, dev: OnTerminal, count: int, **more: object) -> dict[str, object]:
    command = [sys.executable, str(ENGINE), "--quiet-start", "--port", "{port}", "--mark", str(dev.folder)]
    for _, answer in TALK:
        command += ["--say", answer]
    return {"name": name, "replicas": {"min": 0, "max": 4, "count": count}, "profile": [{"engine": "command", "command": command}], **more}


def shoot(page: Page, name: str) -> None:
    page.driver.execute_script("scrollTo(0, 0)")
    time.sleep(0.5)  # fonts and the last redraw
    page.driver.save_screenshot(str(TARGET / f"{name}.png"))
    print(TARGET / f"{name}.png")


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        dev = OnTerminal(Path(folder))
        driver = start_browser(Path(folder) / "profile")
        try:
            page = Page(driver)
            page.open(dev.url)
            page.one("#token")
            shoot(page, "sign-in")
            crash = "import sys; print('cannot read /models/speech: no such file', file=sys.stderr); sys.exit(2)"
            broken = {
                "name": "speech",
                "kind": "audio",
                "profile": [{"engine": "command", "command": [sys.executable, "-c", crash]}],
            }
            dev.admin.apply(table("coder", dev, 2, aliases=["fast"]), table("embedder", dev, 1, kind="embedding"), broken)
            dev.admin.wait_ready(DEMO)
            dev.admin.wait_ready("coder", 2)
            wait_for(lambda: dev.admin.events("replica.failed"), "a replica that has failed")
            page.sign_in(dev)
            page.sees("Live", ".fresh")
            shoot(page, "overview")
            (first,) = dev.admin.replicas(DEMO, "ready")
            for name, place in (
                ("models", ["models"]),
                ("model", ["models", DEMO]),
                ("replicas", ["replicas"]),
                ("events", ["events"]),
            ):
                page.go(*place)
                page.until(lambda: page.all("main .panel"), "a page")
                time.sleep(1)
                shoot(page, name)
            page.go("replicas", first["id"])
            page.until(lambda: page.text(".log").count("\n") > 15, "lines")
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 1150, "deviceScaleFactor": 1, "mobile": False}
            )
            shoot(page, "replica")
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            page.go("playground")
            choose = "const s = document.getElementById('model'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
            page.one("#model")
            page.driver.execute_script(choose, "coder")
            for count, (question, _) in enumerate(TALK, 1):
                page.one("#draft").send_keys(question, Keys.ENTER)
                page.until(lambda: len(page.all(".turn .note")) == count, "the answer", ANSWER_S)  # noqa: B023 - used at once
            tall = {"width": 1280, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", tall)
            shoot(page, "playground")
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            driver.execute_script("document.documentElement.dataset.theme = 'dark'")
            page.go("overview")
            page.sees("Overview", "h1")
            shoot(page, "overview-dark")
            driver.execute_script("delete document.documentElement.dataset.theme")
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 860, "deviceScaleFactor": 1, "mobile": False}
            )
            for name in ("overview", "replicas", "playground"):
                page.go(name)
                page.until(lambda: page.all("main .panel"), "a page")
                shoot(page, f"{name}-narrow")
            print(json.dumps([one["message"] for one in driver.get_log("browser") if "/session" not in one["message"]]))
        finally:
            driver.quit()
            dev.close()


def simulated() -> None:
    """The page of nodes, with GPUs: simulated ones."""
    with tempfile.TemporaryDirectory() as folder:
        dev = OnTerminal(Path(folder), "--sim", "3")
        driver = start_browser(Path(folder) / "profile")
        try:
            page = Page(driver)
            page.sign_in(dev)
            page.go("nodes")
            page.sees("3 nodes")
            page.until(lambda: page.text(".devices").count("GPU 7") == 3 and "GiB of 80" in page.text(".devices"), "memory in use", 60)
            shoot(page, "nodes")
        finally:
            driver.quit()
            dev.close()


_LIMITS = "[guard]\nmax_messages = 200\nmax_images = 8\n[route]\nretries = 2\n"
_RULE = '[[guard.rule]]\nname = "project-names"\nwords = ["Nightjar", "Blue Heron"]\naction = "flag"\n'
VERSIONS = (
    ("[guard]\nmax_messages = 500\n", "no talk of ours is longer"),
    (_LIMITS, "pictures fill the queue"),
    (f"{_LIMITS}{_RULE}", "names that may not leave the house"),
    ("[guard]\nmax_messages = 200\n[route]\nretries = 2\n", "a rule for a day"),
)


def settings() -> None:
    """The page of settings: an edit that waits to be saved, the history, and both on a narrow screen."""
    with tempfile.TemporaryDirectory() as folder:
        dev = OnTerminal(Path(folder), "--no-engine")
        driver = start_browser(Path(folder) / "profile")
        try:
            page = Page(driver)
            page.sign_in(dev)
            for number, (text, why) in enumerate(VERSIONS, 1):
                wait_for(lambda: dev.admin("GET", "/settings")["version"] == number, "the version before")  # noqa: B023 - used at once
                dev.admin("PUT", "/settings", {"toml": text, "reason": why}, **{"if-match": f'"{number}"'})
            page.go("settings")
            page.sees("1 of 1 control plane runs version 5", ".standing")
            page.fill("input[type=search]", "guard")
            page.fill('[id="key-guard.max_messages"]', "300")
            page.sees("1 unsaved change", ".draft")
            shoot(page, "settings")
            page.go("settings", "history")
            page.button("Changes of version 4").click()
            page.sees("From version 3 to version 4", "main")
            shoot(page, "settings-history")
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 860, "deviceScaleFactor": 1, "mobile": False}
            )
            page.go("settings")
            page.fill("input[type=search]", "guard")
            page.sees("1 unsaved change", ".draft")
            shoot(page, "settings-narrow")
        finally:
            driver.quit()
            dev.close()


if __name__ == "__main__":
    main()
    simulated()
    settings()
