"use strict";
// Tables that can be sorted by their headings; long ones show their first rows until asked.

const Tables = (() => {
  const SHOWN = 12;

  // A row that can be taken with the mouse and the keyboard; it is marked until something else is chosen.
  function row(cells, take) {
    if (!take) return Dom.el("tr", { class: "fixed" }, cells);
    const item = Dom.el("tr", { tabindex: "0", onclick: () => mark(), onkeydown: (event) => { if (event.key === "Enter") mark(); } }, cells);
    const mark = () => { take(); item.setAttribute("aria-selected", "true"); };
    return item;
  }

  // columns: {title, value(row) to sort by, text(row) if it shows something else, number}
  // A column that has nothing to say is left out; a name that is too long loses its middle.
  function make(section, rows, described, order, take) {
    const offered = described.map((column) => ({ text: column.value, ...column }));
    const columns = offered.filter((column) => !column.optional || rows.some((row) => column.text(row)));
    let by = columns.indexOf(offered[order]), down = true, all = false;
    const body = Dom.el("tbody", {});
    const more = Dom.el("button", { type: "button", class: "quiet more", onclick: () => { all = !all; draw(); } });
    const heads = columns.map((column, index) => Dom.el("th", { scope: "col", class: column.number ? "number" : null },
      Dom.el("button", { type: "button", onclick: () => sort(index) }, column.title)));

    function sort(index) {
      down = by === index ? !down : Boolean(columns[index].number);
      by = index;
      draw();
    }

    function draw() {
      const { value } = columns[by];
      const sorted = [...rows].sort((a, b) => {
        const x = value(a), y = value(b);
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      });
      heads.forEach((head, index) => head.setAttribute("aria-sort", index !== by ? "none" : down ? "descending" : "ascending"));
      const visible = all ? sorted : sorted.slice(0, SHOWN);
      body.replaceChildren(...visible.map((item) => row(columns.map((column) => Dom.el("td", { class: column.number ? "number" : column.wide ? "wide" : null },
        column.wide ? Dom.middle(column.text(item)) : column.text(item))), () => take(item))));
      more.textContent = all ? "Show fewer" : `Show all ${rows.length.toLocaleString("en")}`;
      more.hidden = rows.length <= SHOWN;
    }

    if (!rows.length) section.append(Dom.el("p", { class: "empty" }, "None."));
    else {
      draw();
      section.append(Dom.el("div", { class: "scroll" }, Dom.el("table", {}, Dom.el("thead", {}, Dom.el("tr", {}, heads)), body)), more);
    }
  }

  function transfers() {
    const words = { activation: "transfer", weight: "stream", input: "input", output: "output", writeback: "written back", gradient: "gradient" };
    make(Dom.byId("transfers"), Plan.flows.map((flow, index) => ({ flow, index })), [
      { title: "What", value: ({ flow }) => Model.carried(flow), wide: true },
      { title: "Kind", value: ({ flow }) => words[flow.kind] },
      { title: "From", value: ({ flow }) => Model.deviceName(flow.from) },
      { title: "To", value: ({ flow }) => Model.deviceName(flow.to) },
      { title: "Bytes", value: ({ flow }) => flow.bytes, text: ({ flow }) => Format.bytes(flow.bytes), number: true },
      { title: "Time", value: ({ flow }) => flow.end - flow.start, text: ({ flow }) => Format.seconds(flow.end - flow.start), number: true },
      { title: "At", value: ({ flow }) => flow.start, text: ({ flow }) => Format.seconds(flow.start), number: true },
    ], 4, ({ index }) => View.choose({ flows: [index] }));
  }

  function weights() {
    const streamed = new Set(Plan.flows.filter((flow) => flow.kind === "weight").flatMap((flow) => flow.names));
    make(Dom.byId("weights"), Plan.weights.map((weight, index) => ({ weight, index })), [
      { title: "Weight", value: ({ weight }) => weight.name, wide: true },
      { title: "Resides on", value: ({ weight }) => weight.home, text: ({ weight }) => Model.deviceName(weight.home) },
      { title: "Shape", value: ({ weight }) => weight.shape, optional: true },
      { title: "Streamed", value: ({ weight }) => (streamed.has(weight.name) ? 1 : 0), text: ({ weight }) => (streamed.has(weight.name) ? "yes" : ""), optional: true },
      { title: "Bytes", value: ({ weight }) => weight.bytes, text: ({ weight }) => Format.bytes(weight.bytes), number: true },
    ], 4, ({ index }) => View.choose({ weight: index }, { centre: true }));
  }

  function start() {
    transfers();
    weights();
    View.on((change) => {
      if (change.chosen !== undefined) document.querySelectorAll("tr[aria-selected]").forEach((item) => item.removeAttribute("aria-selected"));
    });
  }

  return { start, make, row };
})();
