"use strict";
// The plan, and the questions that the parts of the page ask about it.
// A node is a number: the position of a group, or -1 - position of an operation.

const Plan = JSON.parse(document.getElementById("plan").textContent);

const Model = (() => {
  const { groups, operations, devices, weights } = Plan;
  const total = operations.name.length;
  const groupParent = new Int32Array(groups.length).fill(-1);
  const operationParent = new Int32Array(total).fill(-1);
  groups.forEach((group, index) => {
    for (const child of group.children) {
      if (child >= 0) groupParent[child] = index;
      else operationParent[-1 - child] = index;
    }
  });
  const stageOf = new Map(Plan.stages.map((stage, index) => [stage.group, index]));
  const readers = weights.map(() => []);
  operations.reads.forEach((read, op) => read.forEach((weight) => readers[weight].push(op)));
  const starts = new Float64Array(total);
  Plan.estimated.what.forEach((what, i) => {
    if (Plan.estimated.kind[i] === "r") starts[what] = Plan.estimated.start[i];
  });

  const isGroup = (node) => node >= 0;
  const parent = (node) => (isGroup(node) ? groupParent[node] : operationParent[-1 - node]);
  const ancestors = (node) => {
    const found = [];
    for (let up = parent(node); up >= 0; up = parent(up)) found.unshift(up);
    return found;
  };
  const stage = (node) => {
    let top = node;
    for (let up = parent(top); up >= 0; up = parent(up)) top = up;
    return stageOf.get(top);
  };

  return {
    operations: total,
    isGroup,
    parent,
    ancestors,
    stage,
    operation: (index) => -1 - index,
    index: (node) => -1 - node,
    children: (node) => (isGroup(node) ? groups[node].children : []),
    isStage: (node) => isGroup(node) && stageOf.has(node),
    label(node) {
      if (!isGroup(node)) return operations.target[-1 - node];
      return stageOf.has(node) ? `Stage ${stageOf.get(node)}` : groups[node].label;
    },
    // the modules of a stage; nothing where it has none
    about: (node) => (groups[node].label === `stage ${stageOf.get(node)}` ? "" : groups[node].label),
    name(node) {
      if (!isGroup(node)) return operations.name[-1 - node];
      return groups[node].path || groups[node].label;
    },
    seconds: (node) => (isGroup(node) ? groups[node].seconds : operations.seconds[-1 - node]),
    start: (op) => starts[op],
    module: (op) => Plan.modules[operations.module[op]],
    source: (op) => Plan.sources[operations.source[op]],
    // an operation by its module: "lm_head (linear)"
    place: (op) => (Model.module(op) ? `${Model.module(op)} (${operations.target[op]})` : operations.name[op]),
    // what a copy carries: weights and inputs by their names, anything else by what made it
    carried: (flow) => (flow.maker === null ? flow.names.join(", ") : Model.place(flow.maker)),
    device(node) {
      if (!isGroup(node)) return operations.device[-1 - node];
      const index = stage(node);
      return index === undefined ? 0 : Plan.stages[index].device;
    },
    deviceName: (index) => devices[index].name,
    readers: (weight) => readers[weight],
    // of the weights that an operation reads, and of its output
    bytes: (op) => operations.made[op] + operations.reads[op].reduce((sum, weight) => sum + weights[weight].bytes, 0),
    // positions of the operations of a node, in order
    inside(node) {
      return isGroup(node) ? groups[node].children.flatMap(Model.inside) : [-1 - node];
    },
    hasPlace: (op) => operationParent[op] >= 0,
    stages: Plan.stages.map((item) => item.group),
  };
})();

// What is open and what is chosen; every part of the page follows it.
const View = (() => {
  const open = new Set();
  const listeners = [];
  let chosen = null;
  const tell = (what) => listeners.forEach((listener) => listener(what));
  return {
    on: (listener) => listeners.push(listener),
    isOpen: (node) => open.has(node),
    chosen: () => chosen,
    // the nodes that are chosen: of a weight, those that read it; of copies, none
    nodes() {
      if (!chosen || chosen.flows) return [];
      if (chosen.operations) return chosen.operations.map(Model.operation);
      return chosen.node !== undefined ? [chosen.node] : Model.readers(chosen.weight).filter(Model.hasPlace).map(Model.operation);
    },
    // the operations that are chosen, with those inside a group; of copies, their makers and readers
    operations() {
      if (!chosen) return [];
      if (chosen.flows) return chosen.flows.flatMap((index) => [Plan.flows[index].maker, Plan.flows[index].reader]).filter((op) => op !== null);
      return this.nodes().flatMap(Model.inside);
    },
    // names of the copies that are chosen, as the timeline has them; of a weight, those that bring it
    copies() {
      if (!chosen || !(chosen.flows || chosen.weight !== undefined)) return [];
      const flows = chosen.flows ? chosen.flows.map((index) => Plan.flows[index]) : Plan.flows.filter((flow) => flow.names.includes(Plan.weights[chosen.weight].name));
      return flows.map((flow) => flow.names.join(", "));
    },
    setOpen(node, wanted) {
      if (!Model.isGroup(node) || open.has(node) === wanted) return;
      if (wanted) open.add(node);
      else open.delete(node);
      tell({ opened: node });
    },
    toggle(node) {
      this.setOpen(node, !open.has(node));
    },
    closeAll() {
      open.clear();
      tell({ opened: null });
    },
    // thing: {node}, {weight}, {flows}, {operations, title} or null
    choose(thing, options = {}) {
      chosen = thing;
      const [first] = this.nodes();
      if (first !== undefined) {
        const closed = thing.operations ? [] : Model.ancestors(first).filter((up) => !open.has(up));
        closed.forEach((up) => open.add(up));
        if (closed.length) tell({ opened: closed[0] });
      }
      tell({ chosen: thing, centre: Boolean(options.centre), scroll: Boolean(options.scroll) });
    },
  };
})();
