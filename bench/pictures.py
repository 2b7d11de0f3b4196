"""Takes the pictures of the documentation that show charts, graphs and a run that goes on: ``python bench/pictures.py [OUT]``.

Needs Playwright for Python and a Chromium (``BITWITNESS_CHROMIUM`` or the one on the path), and Model Explorer for the graph.
"""

from __future__ import annotations

import _thread
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bitwitness as bw
from bitwitness.report import build_report
from bitwitness.report.page import to_html
from bitwitness.store.answer import answer_of
from bitwitness.view.live import Live
from bitwitness.view.page import pages_of
from bitwitness.view.scene import two_runs
from bitwitness.view.server import Server

SCRIPT = """
import bitwitness as bw
import torch
from torch import nn
from torch.nn import functional as F

class MLP(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.up, self.down, self.how = nn.Linear(16, 64), nn.Linear(64, 16), how

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate=self.how))

class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.q, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16), MLP(how)

    def forward(self, x):
        y = self.norm(x)
        return x + self.mlp(torch.softmax(self.q(y) @ y.mT, -1) @ y)

class Net(nn.Module):
    def __init__(self, last="none", count=3):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block(last if i == 1 else "none") for i in range(count))
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def train(net, steps, strange=lambda step: None):
    draw, optimizer = torch.Generator().manual_seed(1), torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(steps):
        x = torch.randn(8, 8, 16, generator=draw)
        (net(x) - x.sin()).square().mean().backward()
        strange(step)
        optimizer.step()
        optimizer.zero_grad()

def record(net, out, device, done):
    try:
        with device, bw.Recorder(net, out=out, content="tensors"):
            train(net, 3)
    finally:
        done()
"""
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


def script() -> dict[str, Any]:
    """Return what the script defines; its lines are those of ``train.py``, wherever this is run."""
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(SCRIPT.lstrip(), "train.py", "exec"), names)
    torch.manual_seed(0)
    return names


def record(out: Path, how: str = "none", fault: dict[str, Any] | None = None) -> Path:
    """Record three steps."""
    names = script()
    device = bw.testing.FaultyDevice(bw.testing.from_mapping({"fault": [fault]})) if fault else nullcontext()
    done = threading.Event()
    # A thread that nobody but the script began: its call stacks name no file of this machine.
    _thread.start_new_thread(names["record"], (names["Net"](how), out, device, done.set))
    done.wait()
    return out


@contextmanager
def monitored(out: Path) -> Iterator[None]:
    """Monitor a training in which a weight flips a bit at step 120; it goes on inside the ``with``."""
    names = script()
    net = names["Net"]()

    def strange(step: int) -> None:
        if step == 120:
            with torch.no_grad():
                net.layers[1].mlp.up.weight.view(-1)[5] += 40.0

    with bw.Monitor(net, out=out) as monitor:
        names["train"](net, 200, strange)
        monitor.flush()
        yield


@contextmanager
def served(runs: list[Path], *, compared: bool) -> Iterator[str]:
    """Serve a view; yield its address."""
    scene = two_runs(*runs) if compared else None
    with Server(pages_of(lambda: scene, Live(runs, answer_of))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def seen(browser: Any, address: str, width: int, height: int, scheme: str = "light") -> Any:
    """Open a page."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(address)
    return page


def drawn(browser: Any, file: Path, html: str, size: tuple[int, int] = (1100, 1000), scheme: str = "light") -> Any:
    """Write a report and open it, its charts drawn."""
    file.write_text(html)
    page = seen(browser, file.as_uri(), *size, scheme)
    page.wait_for_selector("html[data-drawn]", timeout=60_000)
    return page


def take(browser: Any, root: Path, out: Path) -> None:
    """Make the runs and take the pictures."""
    opened = partial(seen, browser)

    def report(name: str, runs: list[Path], scheme: str) -> Any:
        return drawn(browser, root / f"{name}.html", to_html(build_report(runs)), scheme=scheme)

    os.chdir(root)  # runs are named as a user names them
    wrong = {
        "site": "layers.1.mlp.up/addmm:forward",
        "from_step": 2,
        "kind": "multiply",
        "factor": 1.5,
        "pattern": "all",
    }
    none, tanh, fault = record(Path("none")), record(Path("tanh"), "tanh"), record(Path("b"), fault=wrong)
    report("pair", [none, fault], "light").screenshot(path=out / "report-pair.png")
    with served([none, tanh], compared=True) as address:
        page = opened(address, 1200, 640)
        page.click("nav [data-view=tree]", timeout=60_000)
        page.wait_for_selector(".node[aria-current=true]")
        page.wait_for_selector("#told dd")
        page.screenshot(path=out / "view-tree.png")
    with monitored(Path("goes-on")), served([Path("goes-on")], compared=False) as address:
        page = opened(address, 1000, 560)
        page.wait_for_selector("svg.line >> nth=1")
        page.screenshot(path=out / "view-live.png")
    page = report("charts", [Path("goes-on")], "dark")
    page.evaluate("document.querySelector('section:has(#timeline)').scrollIntoView()")
    page.screenshot(path=out / "report-charts-dark.png")
    with served([none, tanh], compared=True) as address:
        page = opened(address, 1150, 620)
        page.frame_locator("#explorer").get_by_text("layers.1.mlp/gelu#0:forward", exact=True).first.wait_for(
            state="attached", timeout=120_000
        )
        page.wait_for_timeout(10_000)  # it moves to the node
        page.screenshot(path=out / "view-graph.png", timeout=120_000)


def take_verdict(browser: Any, root: Path, out: Path) -> None:
    """Take the report of the demo's persistent fault, on a desk and on a phone, without what names this machine."""
    subprocess.run([sys.executable, "-m", "bitwitness", "demo", "--quiet", "--out", str(root / "demo")], check=False)
    run = next(path.parent for path in sorted((root / "demo").rglob("events.jsonl")) if '"stopped"' in path.read_text())
    page = to_html(build_report([run])).replace(str(Path(bw.__file__).parents[2]) + "/", "")
    page = re.sub(r"\b[0-9a-f]{32}\b", "MACHINE-ID", page).replace(f"on {platform.node()} ", "on HOST ")
    for name, size in (("verdict", (1100, 1000)), ("phone", (390, 844))):
        drawn(browser, root / f"{name}.html", page, size).screenshot(path=out / f"report-{name}.png")


def main() -> None:
    """Take them all."""
    from playwright.sync_api import sync_playwright

    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "images").resolve()
    chromium = os.environ.get("BITWITNESS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as root:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS), headless=True)
        take_verdict(browser, Path(root), out)
        take(browser, Path(root), out)
        browser.close()


if __name__ == "__main__":
    main()
