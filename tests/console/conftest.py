"""`llmgw dev` on a terminal, a model on an engine with a lively log, and Chromium in front of it."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.programs import Admin, end_tree, free_port, free_ports, wait_for

ENGINE = Path(__file__).parent / "engine.py"
HOSTILE = "<img src=x onerror=alert(1)>"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class OnTerminal:
    """`llmgw dev` whose messages go to a terminal, as a person has it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port, self.admin_port = free_port(), free_port()
        config = folder / "dev.toml"
        config.write_text(f'[agent]\nengine_ports = "{free_ports(20)}"\n[reconcile]\nrestart_backoff_s = [1]\n')
        self.text = ""
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "llmgw", "dev", *options, "--config", str(config), "--data-dir", str(folder / "data")]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        self.log = (folder / "access.log").open("ab")
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=slave, start_new_session=True, env=environment
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            wait_for(lambda: "Ctrl-C ends everything" in self.text or self.process.poll() is not None, f"a start of dev: {self.text}", 90)
            assert self.process.poll() is None, self.text
        except BaseException:
            self.close()
            raise
        self.token = (folder / "data" / "admin-token").read_text().strip()
        self.admin = Admin(f"127.0.0.1:{self.admin_port}", self.token)
        self.url = f"http://127.0.0.1:{self.admin_port}/console/"

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the terminal is gone with its last writer
                return
            self.text += data.decode(errors="replace")

    def link(self) -> str:
        found = re.search(r"http://\S+#link=[0-9a-f]+", self.text)
        assert found is not None, self.text
        return found[0]

    def apply(self, name: str, count: int = 1, **more: Any) -> None:
        command = [sys.executable, str(ENGINE), "--port", "{port}", "--mark", str(self.folder)]
        table = {"name": name, "replicas": {"min": 0, "max": 4, "count": count}, "profile": [{"engine": "command", "command": command}]}
        self.admin.apply({**table, **more})

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        end_tree(str(self.folder))
        os.close(self._master)
        self._reader.join(10)
        self.log.close()


class Page:
    """The browser as a person uses it: what can be seen, what can be pressed."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """As in a new window: also where only the part after # differs."""
        self.driver.get("about:blank")
        self.driver.get(url)

    def go(self, *parts: str) -> None:
        """To a page of the console that is open."""
        self.driver.execute_script("location.hash = '#/' + arguments[0].map(encodeURIComponent).join('/')", list(parts))

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str = "body") -> str:
        """What stands there, or nothing while it is being drawn."""
        try:
            return "\n".join(one.text for one in self.all(css))
        except StaleElementReferenceException:
            return ""

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = 30.0) -> Any:
        try:
            return wait_for(condition, what, limit_s)
        except AssertionError:
            print(self.text(), self.driver.get_log("browser"))
            raise

    def sees(self, text: str, css: str = "body", limit_s: float = 30.0) -> None:
        self.until(lambda: text in self.text(css), f"{text!r} in {css}", limit_s)

    def one(self, css: str) -> WebElement:
        found: list[WebElement] = self.until(lambda: self.all(css), css)
        return found[0]

    def fill(self, css: str, text: str) -> None:
        """As if typed over what stands there."""
        field = self.one(css)
        self.driver.execute_script("arguments[0].focus(); arguments[0].select()", field)
        field.send_keys(text)
        assert field.get_attribute("value") == text

    def button(self, label: str) -> WebElement:
        def found() -> list[WebElement]:
            try:
                return [one for one in self.all("button") if label in (one.text, one.get_attribute("aria-label"))]
            except StaleElementReferenceException:  # the page was just drawn anew
                return []

        return self.until(found, label)[0]

    def sign_in(self, dev: OnTerminal, url: str = "") -> None:
        self.open(url or dev.url)
        self.one("#token").send_keys(dev.token)
        self.button("Sign in").click()
        self.sees("Overview", "h1")


@pytest.fixture(scope="session")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnTerminal]:
    one = OnTerminal(tmp_path_factory.mktemp("console"), "--no-engine")
    try:
        one.apply("m1", 2)
        one.admin.wait_ready("m1", 2)
        yield one
    finally:
        one.close()


def start_browser(folder: Path) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={folder}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver is not None
    assert chromium is not None
    options.binary_location = chromium
    return webdriver.Chrome(options, Service(driver))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        reason = f"{' and '.join(missing)} is not installed (apt install chromium chromium-driver)"
        if os.environ.get("LLMGW_TESTS_REQUIRE_ALL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    driver = start_browser(tmp_path / "profile")
    try:
        yield Page(driver)
    finally:
        driver.quit()
