"use strict";
// Where the time goes: by module and by type of operation, measured seconds beside the estimated.

const Spent = (() => {
  const ROWS = 10;
  const { operations, devices, time } = Plan;
  const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

  // Seconds that an operation waits for streamed weights, by its position.
  function waits() {
    const readers = new Map(Plan.flows.map((flow) => [flow.names.join(", "), flow.reader])), found = new Map();
    Plan.estimated.kind.forEach((kind, i) => {
      const reader = kind === "w" ? readers.get(Plan.estimated.what[i]) : null;
      if (reader !== null && reader !== undefined) found.set(reader, (found.get(reader) || 0) + Plan.estimated.end[i] - Plan.estimated.start[i]);
    });
    return found;
  }
  const waiting = waits();

  // One row: its operations, their seconds on each device, and how long these wait.
  function row(name, members) {
    const compute = devices.map(() => 0);
    members.forEach((op) => { compute[operations.device[op]] += operations.seconds[op]; });
    const waited = sum(members.map((op) => waiting.get(op) || 0));
    const measured = Plan.measured ? sum(members.map((op) => Details.measured(op) || 0)) : 0;
    return { name, members, compute, waited, measured, seconds: sum(compute) + waited };
  }

  // Modules by their names without numbers ("model.layers.*.mlp"): the one that takes most is divided until
  // there are enough.
  function byModule() {
    const paths = Plan.modules.map((path) => path.split(".").filter(Boolean).map((part) => (/^\d+$/.test(part) ? "*" : part)));
    const divided = ({ members, depth, name }) => {
      const inside = new Map();
      for (const op of members) {
        const path = paths[operations.module[op]].slice(0, depth + 1), key = path.join(".");
        inside.set(key, [...(inside.get(key) || []), op]);
      }
      const named = (key) => (inside.size > 1 && (key || "(root)") === name ? `${name} itself` : key);
      return [...inside].map(([key, found]) => ({ ...row(named(key), found), depth: (key || "(root)") === name ? Infinity : depth + 1 })).filter((part) => part.seconds > 0);
    };
    let rows = [{ ...row("(root)", operations.name.map((_, op) => op)), depth: 0 }];
    for (;;) {
      const next = [...rows].sort((a, b) => b.seconds - a.seconds)
        .map((one) => ({ one, parts: one.depth === Infinity ? [] : divided(one) }))
        .find(({ parts }) => parts.length && rows.length - 1 + parts.length <= ROWS);
      if (!next) break;
      rows = rows.flatMap((one) => (one === next.one ? next.parts : [one]));
    }
    return rows;
  }

  function byType() {
    const types = new Map();
    operations.target.forEach((target, op) => types.set(target, [...(types.get(target) || []), op]));
    const rows = [...types].map(([target, members]) => ({ ...row(target, members), waited: 0 })).map((one) => ({ ...one, seconds: sum(one.compute) }));
    const rest = rows.sort((a, b) => b.seconds - a.seconds).splice(ROWS - 3);
    if (rest.length) rows.push({ ...row(Format.count(rest.length, "other type"), rest.flatMap((one) => one.members)), waited: 0, seconds: sum(rest.map((one) => one.seconds)), last: true });
    const copies = [["waiting for weights", time.streaming, "activation"], ["transfers", time.transfers, "transfer"], ["inputs and outputs", time.inputs + time.outputs, "ink"]];
    return [...rows, ...copies.map(([name, seconds, colour]) => ({ name, members: [], compute: [], waited: 0, measured: 0, seconds, colour }))];
  }

  function table(title, rows) {
    const shown = rows.filter((one) => one.seconds > 0).sort((a, b) => Boolean(a.last) - Boolean(b.last) || b.seconds - a.seconds);
    const whole = Plan.summary.makespan || 1, most = Math.max(...shown.map((one) => one.seconds), 1e-12);
    const part = (seconds, colour) => (seconds > 0 ? Dom.el("i", { style: `--fill: var(--${colour}); width: ${100 * seconds / most}%` }) : null);
    const cells = (one) => [
      Dom.el("td", { class: "wide" }, Dom.middle(one.name)),
      Dom.el("td", { class: "share" }, Dom.el("span", { class: "meter", "aria-hidden": "true" },
        one.compute.map((seconds, device) => part(seconds, `device-${device}`)), part(one.waited, "activation"), one.colour ? part(one.seconds, one.colour) : null)),
      Dom.el("td", { class: "number" }, Format.seconds(one.seconds)),
      Dom.el("td", { class: "number" }, Format.percent(one.seconds / whole)),
      Plan.measured ? Dom.el("td", { class: "number" }, one.measured ? Format.seconds(one.measured) : "") : null,
    ];
    const heads = [title, "", "Time", "Share", ...(Plan.measured ? ["Measured"] : [])];
    return Dom.el("table", {},
      Dom.el("thead", {}, Dom.el("tr", {}, heads.map((text, i) => Dom.el("th", { scope: "col", class: i > 1 ? "number" : null }, text)))),
      Dom.el("tbody", {}, shown.map((one) => Tables.row(cells(one), one.members.length ? () => View.choose({ operations: one.members, title: one.name }) : null))));
  }

  function start() {
    Dom.byId("spent-tables").append(table("Module", byModule()), table("Type of operation", byType()));
  }

  return { start };
})();
