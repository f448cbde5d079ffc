"use strict";
// The graph on paper: all that is open, in as many rows as it takes to be read.

const Paper = (() => {
  const MOST_ROWS = 6, READABLE = 0.5, NAMES = 170, MARGIN = 16, TALLEST = 310;

  // view: the graph, its canvas, the boxes of the lanes and their names, how they follow, and the lanes' height
  function lay({ cy, canvas, lanes, names, follow, tall }) {
    const bench = canvas.parentElement;
    const all = cy.nodes().boundingBox({ includeLabels: false });
    const width = canvas.clientWidth - NAMES - MARGIN;
    const most = Math.min(MOST_ROWS, Math.max(1, Math.ceil(all.w * READABLE / width)));
    const zoom = Math.min(1.1, most * width / all.w, TALLEST / tall);
    const rows = Math.ceil(all.w * zoom / width - 1e-6);
    bench.style.height = `${Math.ceil(tall * zoom) + 2}px`;
    cy.resize();
    const left = NAMES + (rows === 1 ? (width - all.w * zoom) / 2 : 0);
    for (let row = 0; row < rows; row += 1) {
      cy.viewport({ zoom, pan: { x: left - all.x1 * zoom - row * width, y: 0 } });
      follow();
      bench.before(Dom.el("div", { class: "paper-row", style: `height: ${bench.style.height}` }, lanes.cloneNode(true), picture(cy), names.cloneNode(true)));
    }
  }

  // The picture on the screen is redrawn later than the paper is printed, so the paper gets its own: as
  // pixels, for what is drawn stroke by stroke is printed so, and takes viewers minutes.
  function picture(cy) {
    const drawn = cy.renderer().bufferCanvasImage({ full: false, scale: 2 });
    const canvas = Dom.el("canvas", { class: "paper", width: drawn.width, height: drawn.height });
    canvas.getContext("2d").putImageData(drawn.getContext("2d").getImageData(0, 0, drawn.width, drawn.height), 0, 0);
    return canvas;
  }

  function clear(canvas) {
    document.querySelectorAll(".paper-row").forEach((row) => row.remove());
    canvas.parentElement.style.height = "";
  }

  return { lay, clear };
})();
