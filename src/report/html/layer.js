// The graph of the selected checkpoint's layer: nodes in order of depth, with their verdicts.
const SIGNS = { inherited: "·", origin: "✕", nonfinite: "∞", shape: "≠", beyond: "!", reference: "R", precision: "≈", missing: "–", undecided: "?" };
const layerPart = document.getElementById("layer");
let drawnLayer = null;

// An element of SVG; attributes that are null are left out.
function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) if (value != null) node.setAttribute(key, value);
  node.append(...children.filter((child) => child != null));
  return node;
}

// Scrolls what is wider than the window sideways, no further than `node` needs to be seen; the page itself does not move.
function reveal(node) {
  const scroll = node?.closest(".scroll");
  if (!scroll) return;
  const box = node.getBoundingClientRect(), frame = scroll.getBoundingClientRect();
  if (box.right > frame.right) scroll.scrollLeft += box.right - frame.right;
  else if (box.left < frame.left) scroll.scrollLeft += box.left - frame.left;
}

const layerOf = (id) => /^blk\.(\d+)\./.exec(id)?.[1] ?? "";
const shortName = (id) => id.replace(/^blk\.\d+\./, "");

// Nodes of a layer, and what they read from outside, each with its row: one more than the lowest that it reads.
function rowsOfLayer(layer) {
  const rowOf = new Map(), rows = [[]];
  const place = (id, row, outside) => {
    rowOf.set(id, row);
    (rows[row] ||= []).push({ id, outside });
  };
  for (const item of data.checkpoints.filter((item) => layerOf(item.id) === layer)) {
    const inputs = (item.inputs || []).map((at) => data.checkpoints[at].id);
    for (const id of inputs) if (!rowOf.has(id)) place(id, 0, true);
    place(item.id, 1 + Math.max(0, ...inputs.map((id) => rowOf.get(id))), false);
  }
  return { rows: rows.filter((row) => row.length), rowOf };
}

const BOX = { width: 150, height: 34, across: 12, down: 26 };

// Where the boxes of a layer are: each row in the order of what its nodes read, so that few lines cross.
function arrange(rows) {
  const widest = Math.max(...rows.map((row) => row.length));
  const width = widest * (BOX.width + BOX.across), at = new Map();
  rows.forEach((row, y) => {
    const inputs = (id) => (byId.get(id).inputs || []).map((i) => at.get(data.checkpoints[i].id)).filter(Boolean);
    const middle = (id) => { const xs = inputs(id).map((box) => box.x); return xs.length ? xs.reduce((a, b) => a + b) / xs.length : 0; };
    const sorted = y ? [...row].sort((a, b) => middle(a.id) - middle(b.id)) : row;
    const left = (width - row.length * (BOX.width + BOX.across)) / 2;
    sorted.forEach((node, x) => at.set(node.id, { ...node, x: left + x * (BOX.width + BOX.across) + BOX.across / 2, y: y * (BOX.height + BOX.down) + 4 }));
  });
  return { at, width, height: rows.length * (BOX.height + BOX.down) };
}

function box({ id, x, y, outside }) {
  const item = byId.get(id), sign = SIGNS[item.verdict];
  const over = item.candidate ? `${num(item.candidate.over_bound)} × bound` : item.numbers ? `rel L2 ${num(item.numbers.rel_l2)}` : item.verdict;
  const name = outside ? id : shortName(id);
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const shown = cut(name, 21);
  return svg("a", { href: `#row-${id}`, "data-id": id, class: `node ${item.verdict}${FAULTS.has(item.verdict) ? " fault" : ""}${outside ? " outside" : ""}`, "aria-label": `${id}: ${item.verdict}` },
    svg("title", {}, `${id}: ${item.verdict}${item.op ? `, ${item.op}` : ""}`),
    svg("rect", { x, y, width: BOX.width, height: BOX.height }),
    svg("text", { x: x + 7, y: y + 13 }, sign ? `${sign} ${shown}` : shown),
    svg("text", { x: x + 7, y: y + 26, class: "small" }, outside ? "from outside" : cut(`${over}${item.op ? `, ${item.op}` : ""}`, 23)));
}

function drawLayer(id) {
  const layer = layerOf(id);
  if (layer !== drawnLayer) {
    drawnLayer = layer;
    const { rows } = rowsOfLayer(layer);
    layerPart.hidden = !data.checkpoints.some((item) => item.inputs);
    if (layerPart.hidden || !rows.length) return;
    const { at, width, height } = arrange(rows);
    const edges = [];
    for (const to of at.values()) {
      for (const i of to.outside ? [] : byId.get(to.id).inputs || []) {
        const from = at.get(data.checkpoints[i].id);
        if (!from) continue;
        const [x1, y1, x2, y2] = [from.x + BOX.width / 2, from.y + BOX.height, to.x + BOX.width / 2, to.y];
        // A line that passes other rows keeps clear of the boxes in between.
        const bend = (y2 - y1) / 2, side = y2 - y1 > BOX.height + 2 * BOX.down ? BOX.width * 0.9 : 0;
        edges.push(svg("path", { class: FAULTS.has(byId.get(from.id).verdict) ? "from-fault" : null, d: `M${x1} ${y1}C${x1 + side} ${y1 + bend} ${x2 + side} ${y2 - bend} ${x2} ${y2}` }));
      }
    }
    layerPart.querySelector("h2").textContent = layer === "" ? "Outside of the layers, as a graph" : `Layer ${layer}, as a graph`;
    layerPart.querySelector(".scroll").replaceChildren(
      svg("svg", { class: "graph", viewBox: `0 0 ${width} ${height}`, style: `--width:${width}px`, role: "group", "aria-label": "Nodes of the layer, with verdicts" },
        svg("g", { class: "edges" }, ...edges), ...[...at.values()].map(box)));
  }
  layerPart.querySelectorAll(".node.selected").forEach((node) => node.classList.remove("selected"));
  const selected = layerPart.querySelector(`.node[data-id="${CSS.escape(id)}"]`);
  selected?.classList.add("selected");
  reveal(selected);
}
