"""A headless Chromium of the laptop, told what to do through two pipes (Chrome DevTools Protocol): it opens no port."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from .laptop import Laptop

# Without a sandbox: the tests are root's. It asks no server for anything but the page.
_CHROMIUM = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,800", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3, and answers on 4.
_PIPES = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'


class Browser:
    """One tab."""

    def __init__(self, ask: RawIOBase, answers: BufferedReader) -> None:
        self._ask, self._answers = ask, answers
        self._number, self._tab = 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._tab = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **words: Any) -> dict[str, Any]:
        """Return what Chromium answers; events between are read and dropped."""
        self._number += 1
        asked = {
            "id": self._number,
            "method": method,
            "params": words,
            **({"sessionId": self._tab} if self._tab else {}),
        }
        self._ask.write(json.dumps(asked).encode() + b"\0")
        while True:
            said = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                assert byte, "Chromium has ended"
                said += byte
            answer = json.loads(said)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, address: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=address)

    def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str, seconds: float = 120) -> None:
        """Wait until an expression in the page is true."""
        until = time.monotonic() + seconds
        while self.value(script) is not True:
            assert time.monotonic() < until, f"{script}\n{self.value('document.body.innerText')}"
            time.sleep(0.5)

    def press_shift_enter(self) -> None:
        """Press the keys with which a notebook runs a cell."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, path: Path) -> None:
        """Write what the tab shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browsing(laptop: Laptop) -> Iterator[Browser]:
    """Start Chromium on the laptop; it ends after the block."""
    theirs, ours = os.pipe(), os.pipe()
    profile = tempfile.mkdtemp(prefix="chromium-", dir=laptop.home)
    os.chmod(profile, 0o777)  # noqa: S103  (the laptop's user is another one)
    words = ["bash", "-c", _PIPES, "bash", str(theirs[0]), str(ours[1]), *_CHROMIUM, f"--user-data-dir={profile}"]
    child = subprocess.Popen(
        laptop.command(*words), pass_fds=(theirs[0], ours[1]), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        with os.fdopen(theirs[1], "wb", 0) as ask, os.fdopen(ours[0], "rb") as answers:
            yield Browser(ask, answers)
    finally:
        child.terminate()
        child.wait()
