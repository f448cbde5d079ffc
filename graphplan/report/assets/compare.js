"use strict";
// Another plan of the same model beside this one: time, memory, and what is on another device.

const Compare = (() => {
  const { el, byId } = Dom;
  const change = (before, now, format) => (before === now ? "" : `${now > before ? "+" : "−"}${format(Math.abs(now - before))}`);

  // What both plans have, and the difference; nothing where a plan lacks the thing.
  function figures({ figures: [before, now], memory }) {
    const known = (value) => value !== null && value !== undefined;
    const text = (value, format) => (known(value) ? format(value) : "–");
    const row = (name, a, b, format) => (a || b ? [name, text(a, format), text(b, format), known(a) && known(b) ? change(a, b, format) : ""] : null);
    const names = [...new Set([...Object.keys(before.parts), ...Object.keys(now.parts)])];
    return [
      row(`${Plan.summary.call}, estimated`, before.seconds, now.seconds, Format.seconds),
      ...names.map((name) => row(name, before.parts[name], now.parts[name], Format.seconds)),
      ...Object.keys(now.bytes).map((name) => row(name, before.bytes[name], now.bytes[name], Format.bytes)),
      ...memory.flatMap(({ device, peaks, budgets }) => [row(`peak on ${device}`, ...peaks, Format.bytes), row(`budget of ${device}`, ...budgets, Format.bytes)]),
    ].filter(Boolean);
  }

  function both(rows) {
    const heads = ["", "Other plan", "This plan", "Change"];
    return el("div", { class: "scroll" }, el("table", { id: "both" },
      el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", class: i ? "number" : null }, head)))),
      el("tbody", {}, rows.map((cells) => Tables.row(cells.map((text, i) => el("td", { class: i ? "number" : null }, text)))))));
  }

  function moved(section, { operations, weights }) {
    const bytes = (item) => (item.bytes === undefined ? "" : Format.bytes(item.bytes));
    const time = (item) => (item.seconds ? `${Format.seconds(item.seconds[0])} → ${Format.seconds(item.seconds[1])}` : "");
    const what = (item) => (item.operations ? Format.count(item.operations.length, "operation") : Format.count(item.names.length, "weight"));
    const size = (item) => (item.seconds ? Math.max(...item.seconds) * 1e15 : item.bytes); // operations first
    const rows = [...operations, ...weights];
    Tables.make(section, rows, [
      { title: "Module", value: (item) => item.module, wide: true },
      { title: "What", value: what },
      { title: "Other plan", value: (item) => item.from },
      { title: "This plan", value: (item) => item.to },
      { title: "Time", value: size, text: time, number: true, optional: true },
      { title: "Bytes", value: (item) => item.bytes || 0, text: bytes, number: true, optional: true },
    ], 4, (item) => View.choose({ operations: item.operations || readers(item.names), title: `${item.module}, moved from ${item.from} to ${item.to}` }));
  }

  const readers = (names) => Plan.weights.flatMap((weight, index) => (names.includes(weight.name) ? Model.readers(index).filter(Model.hasPlace) : []));

  function start() {
    const { other } = Plan;
    byId("compare").hidden = !other;
    if (!other) return;
    const [there, here] = other.unmatched;
    if (there || here) byId("compare").append(el("p", { class: "hint" }, `${Format.count(there, "operation")} of the other plan and ${here} of this one have no counterpart.`));
    const section = el("section", { id: "moved" }, el("h3", {}, "On another device"));
    byId("compare").append(el("div", { class: "columns" }, both(figures(other)), section));
    moved(section, other);
  }

  return { start };
})();
