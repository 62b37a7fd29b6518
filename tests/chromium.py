"""A page as headless Chromium shows it, over its DevTools protocol."""

import json
import shutil
import subprocess
import time
from pathlib import Path

from websockets.sync.client import connect

PATH = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-port=0"
)


class Chromium:
    """One browser with one page; what it asked the network for and complained of is kept."""

    def __init__(self, profile: Path):
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.loaded, self.number = False, 0
        self.process = subprocess.Popen(
            [PATH, *OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = profile / "DevToolsActivePort"
        deadline = time.time() + 60
        while not (port.exists() and len(port.read_text().splitlines()) == 2):
            assert time.time() < deadline, "chromium did not start"
            time.sleep(0.05)
        number, path = port.read_text().splitlines()
        self.socket = connect(f"ws://127.0.0.1:{number}{path}", max_size=None).__enter__()
        self.session = None
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait()

    def call(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        self.socket.send(
            json.dumps(message | ({"sessionId": self.session} if self.session else {}))
        )
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self) -> dict:
        event = json.loads(self.socket.recv(60))
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(params))
        elif method == "Page.loadEventFired":
            self.loaded = True
        return event

    def show(self, page: Path, width: int, dark: bool = False) -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.call("Page.navigate", url=page.as_uri())
        while not self.loaded:
            self.receive()

    def ask(self, expression: str):
        """The value of an expression on the page; None where it has none."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")
