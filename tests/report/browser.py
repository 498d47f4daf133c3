"""A real Chromium without a window, driven through its DevTools, for tests."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE = 60.0  # seconds for any one thing
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A page in the browser.

    Attributes:
        complaints: Errors and warnings of its console, exceptions, and what its policy has blocked.
        requests: Addresses that it has asked for.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._number, self._session = socket, 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._socket.send(json.dumps({**message, "sessionId": self._session} if self._session else message))
        while True:
            answer = json.loads(self._socket.recv(timeout=DEADLINE))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path) -> None:
        """Open a file and wait until its scripts have run."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        patience = time.monotonic() + DEADLINE
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < patience, expression
            time.sleep(0.05)

    def fill(self, name: str, value: str) -> None:
        """Give an input or a choice a value, as a user does."""
        event = "dispatchEvent(new Event('input', {bubbles: true}))"
        self.evaluate(f"{{const it = document.getElementById('{name}'); it.value = {json.dumps(value)}; it.{event}}}")

    def screenshot(self, path: Path) -> None:
        """Save what is to be seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """Start a Chromium that keeps its files in `directory`; it is gone with all it has started at the end."""
    from websockets.sync.client import connect

    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"]
    with (directory / "chromium.log").open("w+") as log:
        process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={directory / 'profile'}", "about:blank"],
            stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)},
        )  # fmt: skip
        try:
            patience = time.monotonic() + DEADLINE
            while not (found := re.search(r"ws://127\.0\.0\.1:\d+/\S+", (directory / "chromium.log").read_text())):
                assert time.monotonic() < patience, (directory / "chromium.log").read_text()
                assert process.poll() is None, (directory / "chromium.log").read_text()
                time.sleep(0.05)
            with connect(found[0], max_size=None, open_timeout=DEADLINE) as socket:
                yield Page(socket)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE)
