"""A real headless Chromium (Debian package chromium), driven by playwright."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.kit.job import Job

CHROMIUM = shutil.which("chromium")
NO_CHROMIUM = CHROMIUM is None
WHY = "chromium is not installed (make hosts)"
TIMEOUT_MS = 40_000


@contextmanager
def opened(url: str, errors: list[str]) -> Iterator[Page]:
    """Open a page. ``errors`` gets the errors of its script, and all refusals by its policy."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}  # Chromium leaves files there
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, env=environment)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
        page.goto(url)
        try:
            yield page
        finally:
            browser.close()


def url_of(job: Job, count: int = 1) -> str:
    """Return the address that this start of ``elasticrun`` has printed among its first lines."""
    pattern = r"^elasticrun: dashboard: (http://127\.0\.0\.1:\d+/)$"
    urls: list[str] = job.wait_for("address", lambda: (u := re.findall(pattern, job.output, re.M))[count - 1 :] and u)
    return urls[count - 1]


def soon(locator: Locator, text: str | re.Pattern[str]) -> None:
    expect(locator).to_contain_text(text, timeout=TIMEOUT_MS)
