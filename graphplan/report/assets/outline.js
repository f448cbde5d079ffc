"use strict";
// The same tree as a list, for the keyboard and for screen readers. Rows are made when they are opened.

const Outline = (() => {
  const root = Dom.byId("outline");
  const items = new Map();

  function row(node) {
    const group = Model.isGroup(node);
    const label = Model.isStage(node) ? `${Model.stage(node)} · ${Plan.groups[node].label}` : Model.label(node);
    const time = Model.seconds(node);
    const item = Dom.el("li", {
      role: "treeitem", tabindex: "-1", "aria-expanded": group ? "false" : null, "aria-selected": "false", "data-node": node,
    },
    Dom.el("div", { class: group ? "row group" : "row" },
      Dom.el("i", { class: "twist", "aria-hidden": "true" }, group ? "▸" : ""),
      Model.isStage(node) ? Dom.el("i", { class: "dot", style: `--device: var(--device-${Model.device(node)})` }) : null,
      Dom.el("span", { class: "label", title: Model.name(node) }, Dom.middle(label)),
      Dom.el("span", { class: "time" }, time ? Format.seconds(time) : "")));
    items.set(node, item);
    return item;
  }

  // Bring a row and its children, as far as they are open, up to date.
  function sync(node) {
    const item = items.get(node);
    if (!item || !Model.isGroup(node)) return;
    const open = View.isOpen(node);
    item.setAttribute("aria-expanded", String(open));
    item.querySelector(".twist").textContent = open ? "▾" : "▸";
    const list = item.querySelector(":scope > ul");
    if (!open) {
      if (list) list.remove();
      forget(node);
      return;
    }
    if (!list) item.append(Dom.el("ul", { role: "group" }, Model.children(node).map(row)));
    Model.children(node).filter(Model.isGroup).forEach(sync);
  }

  function forget(node) {
    for (const child of Model.children(node)) {
      if (items.delete(child)) forget(child);
    }
  }

  function mark() {
    for (const old of root.querySelectorAll("[aria-selected=true]")) {
      old.setAttribute("aria-selected", "false");
      old.tabIndex = -1;
    }
    const item = items.get(View.nodes()[0]);
    const current = item || root.firstElementChild;
    if (current) current.tabIndex = 0;
    if (!item) return;
    item.setAttribute("aria-selected", "true");
    const box = item.firstElementChild.getBoundingClientRect(), frame = root.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > frame.bottom) root.scrollTop += box.top - frame.top - frame.height / 3;
  }

  const nodeOf = (item) => Number(item.dataset.node);

  function go(item) {
    if (!item) return;
    View.choose({ node: nodeOf(item) }, { centre: true });
    item.focus({ preventScroll: true });
  }

  function keys(event) {
    const item = event.target.closest("li");
    if (!item) return;
    const node = nodeOf(item), rows = [...root.querySelectorAll("li")], at = rows.indexOf(item), open = View.isOpen(node);
    const actions = {
      ArrowDown: () => go(rows[at + 1]),
      ArrowUp: () => go(rows[at - 1]),
      Home: () => go(rows[0]),
      End: () => go(rows[rows.length - 1]),
      ArrowRight: () => (Model.isGroup(node) && !open ? View.setOpen(node, true) : Model.isGroup(node) && go(rows[at + 1])),
      ArrowLeft: () => (open ? View.setOpen(node, false) : go(item.parentElement.closest("li"))),
      Enter: () => View.toggle(node),
      " ": () => View.toggle(node),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  function start() {
    root.append(...Model.stages.map(row));
    if (!Model.stages.length) root.append(Dom.el("li", { class: "none" }, "nothing runs in this plan"));
    mark();
    root.addEventListener("keydown", keys);
    root.addEventListener("click", (event) => {
      const item = event.target.closest("li[data-node]");
      if (!item) return;
      const node = nodeOf(item);
      View.choose({ node }, { centre: true });
      View.toggle(node);
      item.focus({ preventScroll: true });
    });
    View.on((change) => {
      if (change.opened !== undefined) Model.stages.forEach(sync);
      mark();
    });
  }

  return { start };
})();
