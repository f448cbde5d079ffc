"""Take screenshots of plans' HTML pages for the README and the how-to, in ``docs/pictures``.

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
from transformers import LlamaConfig, LlamaForCausalLM, SegformerConfig, SegformerForSemanticSegmentation

import graphplan

PICTURES = Path(__file__).parents[1] / "pictures"
_WIDTH, _HEIGHT = 1440, 1000  # CSS pixels of the window
_CHOSEN = 2  # index of the stage whose details the numbered picture shows
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
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
    model, ids = _llama(4096, 14336, 32, 32, 8, 128256), torch.ones(1, 512, dtype=torch.long, device="meta")
    speeds = {
        0: graphplan.Speed(flops=165e12, bandwidth=1008e9),
        1: graphplan.Speed(flops=71e12, bandwidth=936e9),
    }
    bf16 = model.to(torch.bfloat16).eval()
    return graphplan.plan(bf16, {0: "9GiB", 1: "7GiB"}, kwargs={"input_ids": ids}, devices=speeds)


def _llama(*sizes: int) -> LlamaForCausalLM:
    """Return a Llama on the meta device; ``sizes`` are the values of ``_SIZES``."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(use_cache=False, **dict(zip(_SIZES, sizes, strict=True))))


def segformer() -> graphplan.Plan:
    """Plan Segformer B2 on the CPU and a GPU with room for a part of it."""
    sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
    with torch.device("meta"):
        model = SegformerForSemanticSegmentation(SegformerConfig(**sizes, num_labels=150)).eval()
        inputs = {"pixel_values": torch.ones(1, 3, 512, 512)}
    return graphplan.plan(model, {0: "200MiB", "cpu": "16GiB"}, kwargs=inputs)


def training() -> graphplan.Plan:
    """Plan a training step of a small Llama with AdamW, on two GPUs and the CPU."""
    model = _llama(1024, 2816, 4, 16, 16, 32000)
    ids = torch.ones(4, 256, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    memory = {0: "1600MiB", 1: "1GiB", "cpu": "8GiB"}
    return graphplan.plan(model, memory, kwargs=inputs, train=True, optimizer=torch.optim.AdamW)


def streamed() -> graphplan.Plan:
    """Plan Llama 3.2 1B in bfloat16 on the CPU and a GPU with room for half of it."""
    model = _llama(2048, 8192, 16, 32, 8, 128256)
    ids = torch.ones(1, 2048, dtype=torch.long, device="meta")
    memory = {0: "1500MiB", "cpu": "16GiB"}
    return graphplan.plan(model.to(torch.bfloat16).eval(), memory, kwargs={"input_ids": ids})


# name of the picture -> the page's title, and the function that makes its plan
PAGES = {
    "page": ("Llama 3 8B", example),
    "segformer": ("Segformer B2", segformer),
    "training": ("A training step", training),
    "streamed": ("Llama 3.2 1B", streamed),
}


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
        for name, (title, plan) in PAGES.items():
            page_file = Path(folder) / f"{name}.html"
            plan().save_html(page_file, title=title)
            for scheme in ("light", "dark"):
                _shoot(browser, page_file, f"{name}-{scheme}", scheme)
        _shoot(browser, Path(folder) / "page.html", "page-numbered", "light", numbered=True)
        browser.close()


if __name__ == "__main__":
    main()
