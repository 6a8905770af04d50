"""A headless Chromium, driven by its own protocol over a pipe: nothing but the browser itself is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import PATIENCE

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser's path; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page. Its errors, and what its policy forbids, are in `complaints`."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._session: str | None = None
        self._number = 0
        self._rest = b""
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        frame, _, self._rest = self._rest.partition(b"\0")
        return json.loads(frame)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(
                    params["exceptionDetails"].get("exception", params).get("description", "")
                )
            case "Log.entryAdded" if params["entry"]["source"] in ("security", "violation", "other"):
                self.complaints.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def look(self, width: int, height: int, theme: str = "light", scale: int = 1) -> None:
        """Emulate a screen of this size, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = PATIENCE) -> None:
        """Until an expression is true, as JavaScript has it."""
        until = time.monotonic() + timeout_s
        while not self.run(f"!!({script})"):
            assert time.monotonic() < until, f"{script} stayed false; {self.complaints}"
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        """A key, where the focus is. code: the key's Windows code, which the browser asks for."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more
            )

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """profile: a folder of its own."""
    path = find()
    assert path is not None
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --no-first-run "
        "--disable-background-networking --disable-component-update --disable-extensions --hide-scrollbars"
    )
    # its protocol is spoken on the descriptors 3 and 4
    command = f'exec "$0" {flags} "--user-data-dir=$1" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", command, path, str(profile)],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(read, write)
    finally:
        os.close(write)
        os.close(read)
        process.terminate()
        process.wait(PATIENCE)
