"use strict";
// Making elements, colours and the tooltip. Text is always set as text.

const Dom = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined) element.append(child);
    }
    return element;
  }
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const pairs = (rows) => el("dl", {}, rows.map(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));
  const byId = (id) => document.getElementById(id);
  const pen = document.createElement("canvas").getContext("2d");
  // Pixels that a line takes in the page's font.
  function textWidth(text, size, weight = 400) {
    pen.font = `${weight} ${size}px system-ui, sans-serif`;
    return pen.measureText(text).width;
  }
  // The middle left out, where a text has too little room; by code points, so that none is cut in two.
  function clip(text, room, size) {
    if (textWidth(text, size) <= room) return text;
    const letters = [...text];
    let kept = letters.length - 1;
    const shorter = () => `${letters.slice(0, Math.ceil(kept / 2)).join("")}…${letters.slice(letters.length - Math.floor(kept / 2)).join("")}`;
    while (kept > 2 && textWidth(shorter(), size) > room) kept -= 1;
    return shorter();
  }
  // A line that is clipped so to the width it has, now and later.
  const whole = new WeakMap();
  const watch = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
    if (contentRect.width) target.textContent = clip(whole.get(target), contentRect.width, 13);
  }));
  function middle(text) {
    const line = el("span", { class: "middle", title: text }, text);
    whole.set(line, text);
    watch.observe(line);
    return line;
  }
  return { el, svg, pairs, byId, textWidth, clip, middle };
})();

const Colours = (() => {
  const root = document.documentElement;
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let forced = null;
  let printing = false;

  const isDark = () => !printing && (forced === null ? wanted.matches : forced);
  function apply() {
    root.dataset.theme = isDark() ? "dark" : "light";
    Plan.devices.forEach((_, index) => root.style.setProperty(`--device-${index}`, device(index)));
    listeners.forEach((listener) => listener());
  }
  const device = (index) => Plan.devices[index].colours[isDark() ? 1 : 0];
  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function channels(hex) {
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }
  function mix(hex, into, part) {
    const a = channels(hex), b = channels(into);
    return `rgb(${a.map((value, i) => Math.round(value * part + b[i] * (1 - part))).join(",")})`;
  }
  wanted.addEventListener("change", apply);
  addEventListener("beforeprint", () => { printing = true; apply(); });
  addEventListener("afterprint", () => { printing = false; apply(); });
  return {
    apply,
    device,
    variable,
    mix,
    isDark,
    force(value) { forced = value; apply(); },
    on: (listener) => listeners.push(listener),
  };
})();

const Tip = (() => {
  const box = Dom.byId("tip");
  return {
    // rows: pairs of words and figures
    show(title, rows, x, y) {
      box.replaceChildren(
        Dom.el("strong", {}, title),
        Dom.pairs(rows),
      );
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
      box.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
})();
addEventListener("scroll", () => Tip.hide(), { passive: true });
