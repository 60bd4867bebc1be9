"""Reads a native reply with EventSource in Chromium and prints what the page saw.

``python eventsource.py CHROMIUM PAGE_URL EVENTS_URL [RELOADS]`` opens a page of the
server's own origin, follows the events, and reloads the page so many times on the way;
the page keeps what it saw in its storage and asks for the rest by ``last_event_id``.
The last line is JSON: the text, the end, and how often the browser asked.
"""

from __future__ import annotations

import json
import sys
import time

from playwright.sync_api import sync_playwright

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
FOLLOW = """
(url) => {
  const seen = JSON.parse(sessionStorage.seen || '{"text": "", "ends": [], "last": ""}');
  const save = () => { sessionStorage.seen = JSON.stringify(seen); };
  const target = new URL(url, location.href);
  if (seen.last) target.searchParams.set("last_event_id", seen.last);
  const source = new EventSource(target);
  source.addEventListener("delta", (event) => {
    seen.last = event.lastEventId;
    seen.text += JSON.parse(event.data).choices[0]?.delta?.content ?? "";
    save();
  });
  for (const name of ["done", "failed"]) {
    source.addEventListener(name, (event) => {
      seen.last = event.lastEventId;
      seen.ends.push(name === "done" ? "done" : JSON.parse(event.data).code);
      save();
    });
  }
  window.source = source;
}
"""
PATIENCE_SECONDS = 30.0
SILENCE_SECONDS = 5.0
"""Longer than Chromium waits before it connects again."""


def main(chromium: str, page_url: str, events_url: str, reloads: int = 0) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(bypass_csp=True)
        asked: list[str] = []
        page.on("request", lambda r: asked.append(r.url) if "/events" in r.url else None)
        page.goto(page_url)
        deadline = time.monotonic() + PATIENCE_SECONDS
        page.evaluate(FOLLOW, events_url)
        for number in range(reloads):
            enough = 10 * (number + 1)
            _wait(page, f"JSON.parse(sessionStorage.seen).text.length > {enough}", deadline)
            page.reload()
            page.evaluate(FOLLOW, events_url)
        _wait(page, "JSON.parse(sessionStorage.seen).ends.length > 0", deadline)
        _wait(page, "window.source.readyState === EventSource.CLOSED", deadline)
        count = len(asked)
        page.wait_for_timeout(SILENCE_SECONDS * 1000)
        seen = json.loads(page.evaluate("sessionStorage.seen"))
        print(json.dumps({**seen, "asked": count, "asked_after": len(asked) - count}))
        browser.close()


def _wait(page: object, condition: str, deadline: float) -> None:
    left = max(deadline - time.monotonic(), 0.1) * 1000
    page.wait_for_function(f"sessionStorage.seen && ({condition})", timeout=left)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
