"""Debian's chromium without a screen, driven over a pipe by the protocol of its developer tools.

https://chromedevtools.github.io/devtools-protocol: JSON messages, each ended by a zero byte. No
library, no open port; it ends when the pipe does. It resolves no name, so a page that would load
anything from elsewhere says so in its console.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium-headless-shell", "chromium")
WIDTH, HEIGHT = 1280, 960
ANSWER_S = 60.0


class Browser:
    """One tab. `errors` is what its console said in red since the last `open`."""

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            pytest.skip("needs Debian's chromium-headless-shell")
        self.errors: list[str] = []
        self._unread = b""
        self._number = 0
        self._session: dict[str, str] = {}
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",  # which root cannot have
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
        ]
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go there; what the page itself loads afterwards may not be there yet."""
        self.errors = []
        failed = self._call("Page.navigate", url=url).get("errorText")
        assert failed is None, f"{url}: {failed}"
        self.wait("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression, a promise awaited; AssertionError if it throws."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 180.0) -> Any:
        """The expression's value once it is true."""
        give_up = time.monotonic() + timeout_s
        while not (value := self.ask(expression)):
            assert time.monotonic() < give_up, f"{expression}: {self.errors} {self.text()}"
            time.sleep(0.2)
        return value

    def text(self) -> str:
        """What can be read on the page."""
        return str(self.ask("document.body?.innerText"))

    def photograph(self, path: Path) -> None:
        """What the window shows, as PNG."""
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End it; it leaves with the pipe."""
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer.get("method"), answer.get("params", {}))
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._from], [], [], ANSWER_S)[0], "the browser does not answer"
            block = os.read(self._from, 2**20)
            assert block, f"the browser ended with exit code {self._process.wait()}"
            self._unread += block
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: str | None, said: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(said["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.errors.append(json.dumps([each.get("value") for each in said["args"]]))
        elif event == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
