"""The page in a browser: its width on a phone, and its colours in the dark."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elasticstate.history.event_files import read_events
from elasticstate.history.job_history import histories
from elasticstate.history.page import page
from tests.kit.events import killed_and_restarted

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")

FRAME = """<!DOCTYPE html><body><iframe width="{width}" height="900" srcdoc="{page}"></iframe><pre id="found"></pre>
<script>
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const style = (selector) => view.getComputedStyle(page.querySelector(selector));
  const inside = (each) => each.getBoundingClientRect().right <= page.documentElement.clientWidth;
  document.querySelector("#found").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    view: page.documentElement.clientWidth,
    wide: [...page.querySelectorAll("figure, .table, p, h1, h2, h3, svg")].filter((each) => !inside(each)).length,
    back: style("body").backgroundColor,
    text: style("body").color,
    axis: style("svg text").fill,
    line: style("svg path[style*='--c0']").stroke,
    letters: Math.min(...[...page.querySelectorAll("svg text")].map((each) => each.getBoundingClientRect().height)),
  }});
}};
</script>"""


def seen(folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Return what Chromium shows of a page with two jobs, in a window of this width."""
    assert BROWSER is not None
    paths = [killed_and_restarted(folder / f"e{n}", f"job-{n}", "ValueError: " + "long " * 50).path for n in (1, 2)]
    text = page([run for path in paths for run in histories(str(path), read_events(str(path)))])
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(text)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={folder / 'profile'}"]
    options += ["--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    options += ["--disable-dev-shm-usage"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}  # the browser leaves a file there
    command = [BROWSER, *options, frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    found = re.search(r'<pre id="found">(\{.*\})</pre>', done.stdout)
    assert found is not None, done.stderr
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    return values


def brightness(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1200, True)])
def test_the_page_fits_the_window_and_can_be_read(tmp_path: Path, width: int, dark: bool) -> None:
    found = seen(tmp_path, width, dark)
    assert found["width"] == found["view"], "the page scrolls sideways"
    assert found["wide"] == 0
    assert (brightness(found["back"]) < 0.1) == dark
    assert contrast(found["text"], found["back"]) > 7
    assert contrast(found["axis"], found["back"]) > 7
    assert contrast(found["line"], found["back"]) > 3
    assert found["letters"] > 8
