"""Take screenshots of the built site in Chromium, and report pages that are wider than the window.

Each page is opened at the width of a laptop and of a phone, in light and dark mode. A page that scrolls horizontally or
that requests a missing file causes an error: wide content must scroll in its own element.

    python scripts/screenshots.py [PAGE ...] [--site docs/_build/html] [--out docs/_build/screenshots]

It needs playwright and a Chromium: `--browser` names one, else that of the system is taken, else playwright's own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTHS = {"laptop": (1366, 768), "telephone": (390, 844)}
SCHEMES = ("light", "dark")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which a page is wider than the window."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as index or results/speed; without any, all")
    parser.add_argument("--site", type=Path, default=ROOT / "docs" / "_build" / "html")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "_build" / "screenshots")
    parser.add_argument("--browser", default=CHROMIUM, help="path of a Chromium (default: %(default)s)")
    arguments = parser.parse_args()
    site = arguments.site.resolve()
    pages = arguments.pages or pages_of(site)
    if missing := [page for page in pages if not (site / f"{page}.html").is_file()]:
        sys.exit(f"{site} has no {', '.join(missing)}: `make docs` builds it")
    faults = []
    for page, kind, fault in take_screenshots(site, pages, arguments.out, arguments.browser):
        faults += [f"{page}, {kind}: {words}" for words in fault]
    print(f"{len(pages)} pages, {len(pages) * 4} pictures in {arguments.out}")
    if faults:
        sys.exit("\n".join(faults))


def pages_of(site: Path) -> list[str]:
    """Every page that is written by hand or by a script: those of the API are alike, and one stands for them."""
    names = (path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html"))
    left_out = ("_", "genindex", "search", "py-modindex")
    written = sorted(name for name in names if not name.startswith((*left_out, "generated/")))
    return [*written, "generated/scdiva.tl.embed"]


def take_screenshots(site: Path, pages: list[str], out: Path, browser: str | None) -> Any:
    """Take the pictures; yield page, kind of picture and what was wrong with it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--allow-file-access-from-files"])
        for kind, (width, height) in WIDTHS.items():
            for scheme in SCHEMES:
                window = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                failed_urls: list[str] = []
                window.on("requestfailed", lambda request, failed_urls=failed_urls: failed_urls.append(request.url))
                window.route("http*://**", lambda route: route.abort())  # no picture depends on the network
                for page in pages:
                    failed_urls.clear()
                    window.goto((site / f"{page}.html").as_uri(), wait_until="load")
                    file = out / f"{page.replace('/', '.')}-{kind}-{scheme}.png"
                    window.screenshot(path=file, full_page=True, animations="disabled")
                    beyond = window.evaluate(TOO_WIDE)
                    wrong = [f"{beyond} px wider than the window"] if beyond > 0 else []
                    wrong += [f"{url} is not there" for url in failed_urls if url.startswith("file:")]
                    yield page, f"{kind}-{scheme}", wrong
                window.close()
        chromium.close()


if __name__ == "__main__":
    main()
