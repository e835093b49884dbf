// Draws the checkpoint that the reader selects. No libraries: the page must work from a mail attachment.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = new Map(data.checkpoints.map((item) => [item.id, item]));
const panel = document.getElementById("checkpoint");
const depth = document.querySelector(".depth");
const links = [...document.querySelectorAll("#cells a")];
const linkOf = new Map(links.map((link) => [link.dataset.id, link]));
const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const FAULTS = new Set(["origin", "nonfinite", "shape", "beyond"]);
// An audit has one side only.
const COMPARED = data.checkpoints.some((item) => item.numbers);
let selected = null;

// Builds an element; attributes that are null are left out.
function el(tag, attributes, ...children) {
  const svg = ["svg", "path", "rect", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) if (value != null) node.setAttribute(key, value);
  node.append(...children.filter((child) => child != null));
  return node;
}

// Two significant digits, as everywhere in parity.
function num(value) {
  if (value == null) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 99.5 && size < 1000) return value.toFixed(0);
  if (size >= 0.0995 && size < 99.5) return value.toFixed(size < 0.995 ? 2 : size < 9.95 ? 1 : 0);
  return value.toExponential(1).replace("e+", "e");
}
const precise = (value, digits = 7) => (value == null ? "not finite" : String(Number(value.toPrecision(digits))));
const index = (at) => `[${at.join(", ")}]`;
const thousands = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, " ");

// A definition list of [label, value] pairs.
function facts(pairs) {
  const list = el("dl", { class: "facts" });
  for (const [label, value] of pairs.filter(([, value]) => value != null)) list.append(el("dt", {}, label), el("dd", {}, value));
  return list;
}

// One side's local error on a logarithmic scale from 1e-3 to 1e6 of its bound; a tick marks the bound.
function meter(name, local) {
  const share = (value) => Math.min(100, Math.max(1, ((Math.log10(Math.max(value, 1e-3)) + 3) / 9) * 100));
  const value = typeof local.over_bound === "string" ? Infinity : local.over_bound;
  const over = !(value <= 1);
  const bar = el("span", { style: `width:${share(value)}%;background:${over ? "var(--fault)" : `var(--${name})`}` });
  const track = el("div", { class: "track" }, bar, el("i", { style: `left:${share(1)}%`, title: "what rounding explains" }));
  return el("div", { class: "meter" }, el("span", {}, name), track, el("output", { class: over ? "over" : null }, `${num(local.over_bound)} ×`));
}

// Blue for negative, orange for positive, both safe for any colour vision; t from -1 to 1.
function diverging(t, dark) {
  const ends = dark ? { zero: [24, 29, 35], low: [98, 181, 245], high: [255, 170, 80] } : { zero: [255, 255, 255], low: [5, 80, 150], high: [200, 80, 0] };
  const end = t < 0 ? ends.low : ends.high;
  const share = Math.abs(t);
  return ends.zero.map((zero, i) => Math.round(zero + (end[i] - zero) * share));
}
const isDark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
};

// Row x column picture of the signed difference.
function heat(detail) {
  const { rows, cols, cells } = detail.grid;
  const canvas = el("canvas", { width: cols, height: rows, role: "img", "aria-label": "difference by token row and column" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(cols, rows);
  const dark = isDark();
  for (let i = 0; i < rows * cols; i++) {
    const level = LEVELS.indexOf(cells[i]);
    const [r, g, b] = level === 0 ? [230, 0, 120] : diverging((level - 32) / 31, dark);
    image.data.set([r, g, b, 255], i * 4);
  }
  context.putImageData(image, 0, 0);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const col = Math.min(cols - 1, Math.floor(((event.clientX - box.left) / box.width) * cols));
    const row = Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * rows));
    tip(event.clientX, event.clientY, cellText(detail, row, Math.max(0, col)));
  });
  canvas.addEventListener("mouseleave", () => tip());
  return canvas;
}

function cellText(detail, row, col) {
  const { rows, cols, cells, top, decades } = detail.grid;
  const range = (at, cells, n) => {
    const first = Math.floor((at * n) / cells), last = Math.ceil(((at + 1) * n) / cells) - 1;
    return last > first ? `${first}–${last}` : `${first}`;
  };
  const level = LEVELS.indexOf(cells[row * cols + col]) - 32;
  const size = top * 10 ** ((Math.abs(level) / 31 - 1) * decades);
  const text = level === -32 ? "not finite" : level === 0 ? "equal" : `${level < 0 ? "−" : "+"}${num(size)}`;
  return `row ${range(row, rows, detail.shape[0])}, column ${range(col, cols, detail.shape[1])}: ${text}`;
}

// How large differences and values are, by powers of two.
function histogram(detail) {
  const { low, difference, reference } = detail.histogram;
  const bins = difference.length, width = 400, height = 70;
  const most = Math.max(1, ...difference, ...reference);
  const svg = el("svg", { class: "histogram", viewBox: `0 0 ${width} 84`, preserveAspectRatio: "none", role: "img", "aria-label": "histogram of |a-b| and of |b|" });
  const bar = (i, n, name) => {
    const tall = n ? 2 + (Math.log(1 + n) / Math.log(1 + most)) * (height - 2) : 0;
    if (tall) svg.append(el("rect", { class: name, x: (i * width) / bins, y: height - tall, width: Math.max(1, width / bins - 0.6), height: tall }));
  };
  reference.forEach((n, i) => bar(i, n, "reference"));
  difference.forEach((n, i) => bar(i, n, "difference"));
  const first = Math.ceil(low * Math.log10(2)), last = Math.floor((low + bins) * Math.log10(2));
  const every = Math.max(1, Math.ceil((last - first) / 7));
  const axis = el("div", { class: "axes" });
  for (let e = first; e <= last; e += every) axis.append(el("span", {}, `1e${e}`));
  return [svg, axis];
}

function worst(detail) {
  const body = el("tbody");
  for (const element of detail.worst) {
    const gap = element.candidate == null || element.reference == null ? "–" : num(element.candidate - element.reference);
    body.append(el("tr", {}, el("td", {}, index(element.index)), el("td", {}, precise(element.candidate)), el("td", {}, precise(element.reference)), el("td", {}, gap)));
  }
  const head = el("thead", {}, el("tr", {}, ...["at", "candidate", "reference", "difference"].map((name) => el("th", {}, name))));
  return el("table", { class: "worst" }, head, body);
}

// What each side recorded and what exact arithmetic makes of its own inputs, where its distance is largest.
function exact(item) {
  const sides = [["candidate", item.candidate], ["reference", item.reference]].filter(([, local]) => local?.values);
  if (!sides.length) return "";
  const rows = sides.map(([name, { at, values: [recorded, exact] }]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, index(at)), el("td", {}, precise(recorded, 9)), el("td", {}, precise(exact, 9)),
      el("td", {}, recorded == null || exact == null ? "–" : num(recorded - exact))));
  const head = el("thead", {}, el("tr", {}, ...["side", "at", "recorded", "exact, of its inputs", "difference"].map((name) => el("th", {}, name))));
  return el("table", { class: "worst" }, head, el("tbody", {}, ...rows));
}

function picture(detail) {
  const ramp = [-1, -0.5, 0, 0.5, 1].map((t) => `rgb(${diverging(t, isDark())})`).join(",");
  const { top, decades } = detail.grid;
  const [svg, axis] = histogram(detail);
  return [
    el("h3", {}, "Difference by token row and column"),
    el("div", { class: "heat" }, heat(detail)),
    el("div", { class: "axes" }, el("span", {}, `↓ positions ${detail.positions.join("–")}`), el("span", {}, `→ ${detail.shape[1]} columns`),
      el("span", {}, "−", el("span", { class: "diverging", style: `background:linear-gradient(90deg,${ramp})` }), `+ ${num(top)}, ${decades} decades`)),
    el("h3", {}, "How large: ", el("span", { style: "color:var(--candidate)" }, "differences"), " and values"),
    svg, axis,
    el("h3", {}, "Worst elements"),
    worst(detail),
  ];
}

function numbers(item) {
  const n = item.numbers;
  if (!n) return [el("p", { class: "evidence" }, "The two sides were not compared here.")];
  const parts = item.parts || [];
  return [el("div", { class: "pair" },
    facts([["rel L2", num(n.rel_l2)], ["max |a-b|", num(n.max)], ["at", index(n.at)], ["a, b", `${num(n.a)}, ${num(n.b)}`], ["mean |a-b|", num(n.mean)], ["RMSE", num(n.rmse)]]),
    facts([["1 − cosine", n.cosine == null ? "–" : num(Math.max(0, 1 - n.cosine))], ["positive", n.sign == null ? "–" : `${(n.sign * 100).toFixed(0)} %`],
      ["NaN, Inf", n.nonfinite.join(", ")], ["passes at", `atol ${num(n.atol)} or rtol ${num(n.rtol)}`],
      ["inherited", item.parts ? num(parts[2]) : null], ["amplified", item.amplification == null ? null : `${num(item.amplification)} ×`]]))];
}

function draw(item) {
  const fault = FAULTS.has(item.verdict);
  const at = data.checkpoints.indexOf(item);
  const step = (by, text, name) => {
    const button = el("button", { type: "button", "aria-label": name, title: name }, text);
    const target = data.checkpoints[at + by];
    if (target) button.addEventListener("click", () => select(target.id));
    else button.disabled = true;
    return button;
  };
  panel.replaceChildren(
    el("div", { class: "head" }, el("h2", {}, item.id), el("span", { class: `chip${fault ? " fault" : ""}` }, item.verdict),
      item.shape.length ? el("span", { class: "caption" }, `(${item.shape.join(", ")})`) : null,
      el("span", { class: "walk" }, step(-1, "←", "previous checkpoint"), step(1, "→", "next checkpoint"))),
    el("p", { class: "evidence" }, item.evidence || data.meanings[item.verdict]),
    item.candidate || item.reference ? el("h3", {}, "Local error over what rounding explains") : "",
    item.candidate ? meter("candidate", item.candidate) : "",
    item.reference ? meter("reference", item.reference) : "",
    exact(item),
    ...(COMPARED ? [el("h3", {}, "Candidate a against reference b"), ...numbers(item)] : []),
    ...(item.detail ? picture(item.detail) : []));
}

// Shows a checkpoint; `focus` moves the keyboard with it.
function select(id, focus) {
  const item = byId.get(id);
  if (!item) return;
  linkOf.get(selected)?.classList.remove("selected");
  selected = id;
  const link = linkOf.get(id);
  for (const other of links) other.setAttribute("tabindex", other === link ? "0" : "-1");
  link.classList.add("selected");
  link.parentNode.append(link);
  if (focus) link.focus({ preventScroll: true });
  const box = link.querySelector("rect"), chart = depth.querySelector(".chart .grid");
  const x = Number(box.getAttribute("x")) + Number(box.getAttribute("width")) / 2;
  document.getElementById("cursor").setAttribute("d", chart ? `M${x} ${Number(box.getAttribute("y")) + 15}V${depth.viewBox.baseVal.height - 18}` : "");
  reveal(link);
  draw(item);
  drawLayer(id);
  history.replaceState(null, "", `#${id}`);
}

// The cell one step away, or the nearest one beyond it.
function neighbour(link, rows, columns) {
  const row = Number(link.dataset.row), column = Number(link.dataset.column);
  let best = null, least = Infinity;
  for (const other of links) {
    const down = (Number(other.dataset.row) - row) * (rows || 1), right = (Number(other.dataset.column) - column) * (columns || 1);
    const ahead = rows ? down : right, aside = Math.abs(rows ? right : down);
    const distance = ahead + aside * 100;
    if (ahead > 0 && distance < least) [best, least] = [other, distance];
  }
  return best;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
depth.addEventListener("keydown", (event) => {
  const link = event.target.closest("a[data-id]");
  if (!link || event.ctrlKey || event.altKey || event.metaKey) return;
  const edge = { Home: data.checkpoints[0], End: data.checkpoints.at(-1) }[event.key];
  const target = STEPS[event.key] ? neighbour(link, ...STEPS[event.key]) : edge && linkOf.get(edge.id);
  if (!STEPS[event.key] && !edge) return;
  event.preventDefault();
  if (target) select(target.dataset.id, true);
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-id]");
  if (link) {
    event.preventDefault();
    select(link.dataset.id, Boolean(link.closest("#cells")));
    if (!link.closest("#cells, #layer")) panel.scrollIntoView({ block: "nearest" });
  }
  const copy = event.target.closest("[data-copy]");
  if (copy) copyText(copy);
});

// The clipboard is not there for files everywhere: then the text is selected for the reader.
async function copyText(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

const bubble = document.getElementById("tip");
function tip(x, y, text) {
  bubble.hidden = !text;
  if (!text) return;
  bubble.textContent = text;
  const left = Math.min(x + 14, innerWidth - bubble.offsetWidth - 8);
  const top = y + 18 + bubble.offsetHeight > innerHeight ? y - bubble.offsetHeight - 10 : y + 18;
  bubble.style.cssText = `left:${Math.max(8, left)}px;top:${top}px`;
}
depth.addEventListener("mousemove", (event) => {
  const link = event.target.closest("a[data-id]");
  tip(event.clientX, event.clientY, link && link.getAttribute("aria-label"));
});
depth.addEventListener("mouseleave", () => tip());

for (const mode of document.querySelectorAll("[name=mode]")) {
  mode.addEventListener("change", () => {
    depth.classList.remove("own", "difference");
    depth.classList.add(mode.value);
  });
}
document.getElementById("only").addEventListener("change", (event) => {
  document.querySelector(".numbers").classList.toggle("only", event.target.checked);
});
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  if (selected) draw(byId.get(selected));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => selected && draw(byId.get(selected)));
addEventListener("hashchange", () => select(decodeURIComponent(location.hash.slice(1))));
