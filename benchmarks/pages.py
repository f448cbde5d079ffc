"""A plan's page: its bytes, seconds to write it, seconds until a headless Chromium has drawn it.

python benchmarks/pages.py [--operations 1000 10000] [--rounds 5]

The plans are of layers of 20 operations over four devices in 40 stages. A page has been opened when its
scripts have run and the next frame is on the screen; each round opens it anew.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from report import table, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from plans import large_plan

FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def measure(browser: Browser, path: Path, operations: int, rounds: int) -> dict[str, Any]:
    plan = large_plan(operations)
    written, opened = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        plan.save_html(path)
        written.append(time.perf_counter() - start)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.evaluate(FRAME)
        opened.append(time.perf_counter() - start)
        page.close()
    return {
        "operations": operations,
        "stages": len(plan.stages),
        "bytes": path.stat().st_size,
        "write_seconds": statistics.median(written),
        "open_seconds": statistics.median(opened),
        "open_seconds_most": max(opened),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("there is no chromium here: apt-get install chromium")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        path = Path(folder) / "plan.html"
        rows = [measure(browser, path, count, asked.rounds) for count in asked.operations]
        found = {"browser": browser.version, "rounds": asked.rounds, "rows": rows}
        browser.close()
    header = ["operations", "MB", "write s", "open s", "most"]
    cells = [
        [
            row["operations"],
            f"{row['bytes'] / 1e6:.2f}",
            *(f"{row[key]:.2f}" for key in ("write_seconds", "open_seconds", "open_seconds_most")),
        ]
        for row in rows
    ]
    print(table(header, cells))
    print(f"wrote {write('pages', found)}")


if __name__ == "__main__":
    main()
