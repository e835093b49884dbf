"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const runs = new Map(data.runs.map(([id, run, called], at) => [id, { ...run, called, at }]));
const $ = (id) => document.getElementById(id);
const node = (name, attributes = {}, text = "") => {
  const svg = ["svg", "path", "circle", "line", "text", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
};
const short = (value) => (value === null ? "no number" : value === 0 ? "0" : value.toExponential(1));
const label = (series) => series.checkpoint ?? "tokens";
const said = (id) => { const run = runs.get(id); return `${run.called} · ${run.created} · ${run.machine} · ${run.verdict}`; };
let selected = null;

function fill(select, values) {
  const old = select.value;
  select.replaceChildren(...[...new Set(values)].map((value) => node("option", { value }, value)));
  if ([...select.options].some((option) => option.value === old)) select.value = old;
}

// Each choice narrows the next.
function choices() {
  let left = data.series;
  for (const key of ["suite", "case", "machine", "what"]) {
    fill($(key), left.map((series) => series[key]));
    left = left.filter((series) => series[key] === $(key).value);
  }
  return left.filter((series) => label(series).includes($("filter").value.trim()));
}

function since(series) {
  return data.worse.find((worse) => ["suite", "case", "machine", "what", "checkpoint"].every((key) => worse[key] === series[key]));
}

function draw() {
  const rows = choices();
  const columns = [...new Set(rows.flatMap((series) => series.values.map(([id]) => id)))].sort((a, b) => runs.get(a).at - runs.get(b).at);
  const table = $("map");
  table.replaceChildren();
  if (!rows.some((series) => label(series) === selected)) {
    selected = rows.length ? label(rows.find(since) ?? rows[0]) : null;
  }
  for (const series of rows) {
    const values = new Map(series.values), least = Math.min(...series.values.map(([, v]) => v ?? Infinity).filter((v) => v > 0));
    const row = node("tr", { "aria-selected": label(series) === selected, "data-id": label(series) });
    row.append(node("th", { scope: "row" }, label(series)));
    for (const id of columns) {
      const value = values.get(id), there = values.has(id);
      const cell = node("td", { title: there ? `${label(series)} ${short(value)}\n${said(id)}` : "not in this run" }, there && value === null ? "×" : "");
      if (value !== undefined && value !== null) {
        const share = value > 0 ? Math.min(1, Math.log10(value / least) / 2) : 0;
        cell.style.background = `color-mix(in oklab, var(--fault) ${Math.round(12 + 88 * share)}%, var(--card))`;
      }
      row.append(cell);
    }
    row.addEventListener("click", () => choose(label(series)));
    table.append(row);
  }
  chart(rows.find((series) => label(series) === selected));
}

function choose(id) {
  selected = id;
  draw();
  document.querySelector("#map tr[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
}

function chart(series) {
  const place = $("chart");
  place.replaceChildren();
  if (!series) { place.append(node("p", { class: "quiet" }, "nothing is chosen")); return; }
  const [W, H, L, B] = [860, 240, 64, 34], bad = since(series);
  const finite = series.values.map(([, v]) => v).filter((v) => v !== null && v > 0);
  const [low, high] = [Math.floor(Math.log10(Math.min(...finite)) - 0.1), Math.ceil(Math.log10(Math.max(...finite)) + 0.1)];
  const x = (i) => L + ((W - L - 20) * (i + 0.5)) / series.values.length;
  const y = (v) => (v === null ? 10 : v > 0 ? 14 + ((H - B - 14) * (high - Math.log10(v))) / Math.max(1, high - low) : H - B);
  const svg = node("svg", { viewBox: `0 0 ${W} ${H}`, "aria-label": `${label(series)}: ${series.what}` });
  for (let power = low; power <= high; power++) {
    const at = y(10 ** power);
    svg.append(node("line", { class: "axis", x1: L, x2: W, y1: at, y2: at }), node("text", { x: L - 8, y: at + 4, "text-anchor": "end" }, `1e${power}`));
  }
  svg.append(node("path", { class: "curve", d: series.values.map(([, v], i) => `${i ? "L" : "M"}${x(i)} ${y(v)}`).join("") }));
  const every = Math.ceil(series.values.length / 10);
  series.values.forEach(([id, value], i) => {
    const dot = node("circle", { cx: x(i), cy: y(value), r: 3.5, class: value === null ? "bad" : "" });
    dot.append(node("title", {}, `${short(value)}\n${said(id)}`));
    svg.append(dot);
    if (i % every === 0) svg.append(node("text", { x: x(i), y: H - 14, "text-anchor": "middle" }, runs.get(id).called.slice(0, 8)));
    if (bad && bad.since.id === id) {
      const at = x(i - 0.5);
      svg.append(node("line", { class: "since", x1: at, x2: at, y1: 0, y2: H - B }));
    }
  });
  const text = bad ? `worse since ${runs.get(bad.since.id).called}: ${short(bad.was)} → ${short(bad.is)}` : "not worse than in the runs before";
  place.append(node("p", { id: "answer" }, `${label(series)}, ${series.what}: ${text}`), svg);
}

function worse() {
  const place = $("worse"), groups = new Map();
  for (const one of data.worse) {
    const key = [one.suite, one.machine, one.case, one.since.id].join("\n");
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  if (!groups.size) place.append(node("p", { class: "good" }, "Nothing is worse than in the runs before."));
  for (const [first, ...others] of groups.values()) {
    const button = node("button", { type: "button" });
    const run = runs.get(first.since.id);
    button.append(node("b", {}, first.checkpoint ?? "the tokens"), ` since ${run.called} (${run.created}): ${first.what} ${short(first.was)} → ${short(first.is)}; ${first.suite}, ${first.case}, ${first.machine}`);
    if (others.length) button.append(`; ${others.length} more numbers of the case since then`);
    button.addEventListener("click", () => {
      $("filter").value = "";
      for (const key of ["suite", "case", "machine", "what"]) { choices(); $(key).value = first[key]; }
      choose(first.checkpoint ?? "tokens");
    });
    place.append(button);
  }
}

$("summary").textContent = `${data.runs.length} runs on ${new Set(data.runs.map(([, run]) => run.machine)).size} machines, ${data.runs[0]?.[1].created ?? "-"} to ${data.runs.at(-1)?.[1].created ?? "-"}`;
for (const id of ["suite", "case", "machine", "what"]) $(id).addEventListener("change", draw);
$("filter").addEventListener("input", draw);
document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
$("map").addEventListener("keydown", (event) => {
  const ids = [...document.querySelectorAll("#map tr")].map((row) => row.dataset.id), at = ids.indexOf(selected);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: ids.length - 1 }[event.key];
  if (to === undefined || !(to in ids)) return;
  event.preventDefault();
  choose(ids[to]);
});
worse();
draw();
// The page begins with what is worse, where something is.
document.querySelector("#worse button")?.click();
scrollTo(0, 0);
