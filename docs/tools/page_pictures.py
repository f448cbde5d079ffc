"""Take screenshots of a plan's HTML page for the README and the how-to, in ``docs/pictures``.

python docs/tools/page_pictures.py

Needs transformers, playwright and a chromium. Run it again when the page or the planner changes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from playwright.sync_api import sync_playwright
from transformers import LlamaConfig, LlamaForCausalLM

import graphplan

PICTURES = Path(__file__).parents[1] / "pictures"
_WIDTH, _HEIGHT = 1440, 1000  # CSS pixels of the window
_CHOSEN = 2  # index of the stage whose details the numbered picture shows
_SCALE = 1200 / _WIDTH  # image pixels per CSS pixel

# CSS selectors of the elements that the how-to's callouts frame, in the order of their numbers
PARTS = (
    "#figures",
    "#usage",
    ".search",
    "#outline",
    "#canvas",
    "#details",
    "#spent",
    "#memory",
    "#timeline",
    "#transfers",
    "#weights",
)

_CALLOUT = """([selector, number]) => {
  const box = document.querySelector(selector).getBoundingClientRect(), ink = "#c2185b", gap = 5;
  const draw = (css, text) => {
    const mark = document.createElement("div");
    mark.textContent = text;
    mark.style.cssText = `position:absolute;box-sizing:border-box;z-index:99;pointer-events:none;${css}`;
    document.body.append(mark);
  };
  const left = box.left + scrollX - gap, top = box.top + scrollY - gap;
  draw(`left:${left}px;top:${top}px;width:${box.width + 2 * gap}px;height:${box.height + 2 * gap}px;
    border:2px solid ${ink};border-radius:6px`, "");
  draw(`left:${Math.max(0, left - 24)}px;top:${Math.max(0, top - 8)}px;width:28px;
    height:28px;border-radius:50%;background:${ink};color:white;text-align:center;
    font:bold 16px/28px sans-serif`, number);
}"""


def example() -> graphplan.Plan:
    """Plan Llama 3 8B in bfloat16 on two mixed GPUs, with the speeds of an RTX 4090 and an RTX 3090."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config).to(torch.bfloat16).eval(), torch.ones(1, 512, dtype=torch.long)
    speeds = {
        0: graphplan.Speed(flops=165e12, bandwidth=1008e9),
        1: graphplan.Speed(flops=71e12, bandwidth=936e9),
    }
    return graphplan.plan(model, {0: "9GiB", 1: "7GiB"}, kwargs={"input_ids": ids}, devices=speeds)


def _shoot(browser: Any, page_file: Path, name: str, scheme: str, *, numbered: bool = False) -> None:
    window = {"width": _WIDTH, "height": _HEIGHT}
    page = browser.new_page(
        viewport=window, color_scheme=scheme, device_scale_factor=_SCALE, reduced_motion="reduce"
    )
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(500)  # the graph is drawn
    if numbered:
        page.locator("#outline > li").nth(_CHOSEN).click()
    for number, selector in enumerate(PARTS if numbered else (), 1):
        page.evaluate(_CALLOUT, [selector, number])
    page.screenshot(path=PICTURES / f"{name}.png", full_page=numbered)
    page.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page_file = Path(folder) / "page.html"
        example().save_html(page_file, title="Llama 3 8B")
        for scheme in ("light", "dark"):
            _shoot(browser, page_file, f"page-{scheme}", scheme)
        _shoot(browser, page_file, "page-numbered", "light", numbered=True)
        browser.close()


if __name__ == "__main__":
    main()
