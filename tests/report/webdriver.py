"""A headless Chromium, by the W3C's WebDriver protocol that chromedriver speaks: JSON over HTTP on this machine."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request

import pytest

MISSING = "Chromium is not installed; apt-get install chromium chromium-driver"
_SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


class Browser:
    """A browser with a window, and its chromedriver; a context manager that ends both."""

    def __init__(self, chromium, driver, folder):
        self._log = folder / "chromedriver.log"
        command = [driver, "--port=0", f"--log-path={folder / 'verbose.log'}"]
        with self._log.open("w") as log:
            self._driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._session = ""
        try:
            self._address = f"http://127.0.0.1:{self._await_port()}"
            options = {"binary": chromium, "args": [*_SWITCHES, f"--user-data-dir={folder / 'profile'}"]}
            logs = {"browser": "ALL", "performance": "ALL"}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
            found = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{found['sessionId']}"
        except BaseException:
            self.__exit__()
            raise

    def _await_port(self):
        for _ in range(600):
            if found := re.search(r"started successfully on port (\d+)", self._log.read_text()):
                return int(found[1])
            assert self._driver.poll() is None, self._log.read_text()
            time.sleep(0.05)
        raise AssertionError("chromedriver does not start")

    def _send(self, method, path, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self._address}{self._session}{path}", body, method=method)
        request.add_header("Content-Type", "application/json")
        with self._opener.open(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            if self._session:
                self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(30)

    def open(self, path):
        """Open a file as a page."""
        self._send("POST", "/url", {"url": path.as_uri()})

    def run(self, script, *arguments):
        """Run the body of a function in the page, and return its value."""
        return self._send("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait(self, script):
        """Wait until the body of a function in the page returns a true value."""
        for _ in range(600):
            if self.run(script):
                return
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}")

    def emulate(self, width=None, scheme=None, media=""):
        """Set the window's width in pixels, or the colour scheme, and "print" or "" for the screen."""
        if width is not None:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            self.devtools("Emulation.setDeviceMetricsOverride", **size)
        if scheme is not None:
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self.devtools("Emulation.setEmulatedMedia", media=media, features=features)

    def devtools(self, method, **parameters):
        """Call a method of Chromium's DevTools."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": method, "params": parameters})

    def take_log(self, kind):
        """Return what the console ("browser") or the network ("performance") has logged since the last call."""
        return self._send("POST", "/se/log", {"type": kind})


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A browser. Without Chromium, tests are skipped, or fail if HOSTDEV_NEED_CHROMIUM is set, as .ci/run does."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("HOSTDEV_NEED_CHROMIUM"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with Browser(chromium, driver, tmp_path_factory.mktemp("chromium")) as found:
        yield found
