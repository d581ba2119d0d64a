"""A page in headless Chromium, spoken to over its debugging pipe: no driver, no port, no library.

Protocol: Chrome DevTools Protocol (https://chromedevtools.github.io/devtools-protocol/), JSON messages that end in a
zero byte, to file descriptor 3 of the browser and from its 4.
"""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path
from select import select
from time import monotonic

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0


def chromium() -> str:
    """Where it is; a test that needs it is skipped where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no Chromium on this machine (looked for {', '.join(NAMES)}): apt-get install chromium")


class Page:
    """One page that is open. `errors`: what its console and its scripts complained of, and what it wanted to load."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer, self._number, self._session = b"", 0, None
        self._answers: dict = {}
        self._loaded = False
        self.errors: list[str] = []
        self.requested: list[str] = []
        (target,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, file: Path, width: int = 1280, height: int = 900) -> None:
        """Load a file; done when its scripts have run."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        self._until(lambda: self._loaded)

    def run(self, script: str):
        """The value of an expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        """`mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel`, at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def dark(self, wanted: bool = True) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        file.write_bytes(b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def call(self, method: str, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        answer: dict = {}
        self._until(lambda: self._answers.pop(self._number, None), answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, found, into: dict | None = None) -> None:
        until = monotonic() + SECONDS
        while not (answer := found()):
            if not select([self._receive], [], [], max(until - monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            *whole, self._buffer = (self._buffer + os.read(self._receive, 1 << 20)).split(b"\0")
            for message in map(json.loads, whole):
                self._take(message)
        if into is not None:
            into.update(answer)

    def _take(self, message: dict) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        params = message.get("params", {})
        match message["method"]:
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])


@contextmanager
def browser():
    """A `Page`, for as long as the context lasts."""
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip

        started = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
            preexec_fn=_places(to_browser, from_browser),
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(send, receive)
        finally:
            started.kill()
            started.wait()
            os.close(send)
            os.close(receive)


def _places(read: int, write: int):
    def move() -> None:
        apart = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]  # for 3 or 4 may be one of them
        os.dup2(apart[0], 3)
        os.dup2(apart[1], 4)

    return move
