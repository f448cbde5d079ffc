"use strict";
// Finding a module, a parameter or an operation by a part of its name.

const Search = (() => {
  const input = Dom.byId("search"), list = Dom.byId("hits");
  const MOST = 40;
  let entries = null, hits = [], at = -1;

  // Built at the first letter: most readers never search.
  function index() {
    const found = [], seen = new Set();
    const add = (kind, text, thing) => found.push({ kind, text, low: text.toLowerCase(), thing });
    Plan.groups.forEach((group, position) => {
      if (group.kind !== "module" || seen.has(group.path)) return;
      seen.add(group.path);
      add("module", group.path, { node: position });
    });
    Plan.operations.module.forEach((module, op) => {
      const path = Plan.modules[module];
      if (!path || seen.has(path) || !Model.hasPlace(op)) return;
      seen.add(path);
      add("module", path, { node: Model.operation(op) });
    });
    Plan.weights.forEach((weight, position) => {
      for (const name of [weight.name, ...weight.names]) add(weight.kind, name, { weight: position });
    });
    Plan.operations.name.forEach((name, op) => {
      if (Model.hasPlace(op)) add("operation", name, { node: Model.operation(op) });
    });
    return found;
  }

  function rank(entry, wanted) {
    const position = entry.low.indexOf(wanted);
    const whole = entry.low === wanted ? -4 : 0;
    const word = position === 0 || ".[_".includes(entry.low[position - 1]) ? -1 : 0;
    return whole + word + entry.low.length / 1000 + (entry.kind === "operation" ? 0.5 : 0);
  }

  function find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    entries = entries || index();
    return entries
      .filter((entry) => words.every((word) => entry.low.includes(word)))
      .map((entry) => ({ entry, rank: rank(entry, words[0]) }))
      .sort((a, b) => a.rank - b.rank)
      .slice(0, MOST)
      .map((item) => item.entry);
  }

  function show() {
    hits = find(input.value);
    at = hits.length ? 0 : -1;
    list.replaceChildren(...hits.map((hit, position) => Dom.el("li", {
      role: "option", id: `hit-${position}`, onmousedown: (event) => { event.preventDefault(); take(position); },
    }, Dom.el("span", { class: "kind" }, hit.kind), Dom.el("span", { class: "label" }, hit.text))));
    if (input.value.trim() && !hits.length) list.append(Dom.el("li", { class: "none" }, "No matches."));
    open(Boolean(input.value.trim()));
    mark();
  }

  function open(wanted) {
    list.hidden = !wanted;
    input.setAttribute("aria-expanded", String(wanted));
  }

  function mark() {
    hits.forEach((_, position) => list.children[position].setAttribute("aria-selected", String(position === at)));
    if (at >= 0) {
      input.setAttribute("aria-activedescendant", `hit-${at}`);
      const { offsetTop: top, offsetHeight: height } = list.children[at]; // scrollIntoView would scroll the page as well
      list.scrollTop = Math.min(top, Math.max(list.scrollTop, top + height - list.clientHeight));
    } else input.removeAttribute("aria-activedescendant");
  }

  // What the end of the page's address names, "#model.layers.3": a module that is shown with its only child too.
  function follow() {
    const wanted = location.hash, hash = (entry) => new URL(`#${entry.text}`, location.href).hash;
    if (wanted.length < 2) return;
    entries = entries || index();
    const hit = entries.find((entry) => hash(entry) === wanted) || entries.find((entry) => hash(entry).startsWith(`${wanted}.`));
    if (hit) View.choose(hit.thing, { centre: true, scroll: true });
  }

  function take(position) {
    const hit = hits[position];
    if (!hit) return;
    open(false);
    input.value = hit.text;
    View.choose(hit.thing, { centre: true });
  }

  function keys(event) {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (!hits.length) return;
      at = (at + (event.key === "ArrowDown" ? 1 : hits.length - 1)) % hits.length;
      mark();
    } else if (event.key === "Enter") take(at);
    else if (event.key === "Escape") {
      open(false);
      input.value = "";
      input.blur();
    } else return;
    event.preventDefault();
  }

  function start() {
    input.addEventListener("input", show);
    addEventListener("hashchange", follow);
    input.addEventListener("keydown", keys);
    input.addEventListener("focus", () => { if (input.value.trim()) show(); });
    input.addEventListener("blur", () => open(false));
    addEventListener("keydown", (event) => {
      if (event.key !== "/" || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      event.preventDefault();
      input.focus({ preventScroll: true });
      input.select();
    });
  }

  return { start, follow };
})();
