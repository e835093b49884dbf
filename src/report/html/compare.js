// Compares this report with another one that the reader opens: report.json, or a page like this one.
const WORSE = 2; // as `parity diff-reports` has it: smaller changes are noise
const FLOOR = 2 ** -24; // below, a difference is a rounding of f32

// What is compared of a checkpoint, from either kind of file.
function measure(item) {
  const local = item.candidate && item.candidate.over_bound !== undefined && !Array.isArray(item.candidate) ? item.candidate : item.local?.candidate;
  const distance = item.numbers ? item.numbers.rel_l2 : item.rel_l2;
  return { verdict: item.verdict, over: local ? Number(local.over_bound) : null, distance: distance == null ? null : Number(distance) };
}

function readOther(text) {
  const page = text.trimStart().startsWith("<");
  const json = page ? new DOMParser().parseFromString(text, "text/html").getElementById("data")?.textContent : text;
  const other = JSON.parse(json);
  if (!Array.isArray(other.checkpoints)) throw new Error("it has no checkpoints");
  return new Map(other.checkpoints.map((item) => [String(item.id), measure(item)]));
}

// Checkpoints that changed, worst first: [id, what, ratio].
function changes(other) {
  const out = [];
  for (const item of data.checkpoints) {
    const [now, then] = [measure(item), other.get(item.id)];
    if (!then) continue;
    if (now.verdict !== then.verdict) out.push([item.id, `${then.verdict} → ${now.verdict}`, Infinity]);
    const ratio = (a, b) => Math.max(a, FLOOR) / Math.max(b, FLOOR);
    const grown = (name, a, b, least) => {
      if (a == null || b == null || Math.max(a, b) < least) return;
      const factor = ratio(a, b);
      if (!(factor < WORSE && factor > 1 / WORSE)) out.push([item.id, `${name} ${num(b)} → ${num(a)}`, factor]);
    };
    grown("local error / bound", now.over, then.over, 1);
    grown("rel L2", now.distance, then.distance, FLOOR);
  }
  return out.sort((a, b) => b[2] - a[2]);
}

const CHANGES_MAX = 200;
const comparePart = document.getElementById("compare");
function showChanges(name, other) {
  const common = data.checkpoints.filter((item) => other.has(item.id)).length;
  const all = changes(other);
  const rows = all.slice(0, CHANGES_MAX).map(([id, what]) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#row-${id}`, "data-id": id }, id)), el("td", {}, what)));
  const only = data.checkpoints.length - common, gone = other.size - common;
  comparePart.hidden = false;
  comparePart.querySelector(".outcome").textContent =
    `${name} → this report: ${common} checkpoints in common, ${only} only here, ${gone} only there; ${all.length ? `${all.length} changes` : "nothing changed"}` +
    (all.length > CHANGES_MAX ? `, the largest ${CHANGES_MAX} shown` : "");
  comparePart.querySelector("tbody").replaceChildren(...rows);
}

document.getElementById("other").addEventListener("change", async (event) => {
  const file = event.target.files[0];
  if (!file) return;
  try {
    showChanges(file.name, readOther(await file.text()));
  } catch (error) {
    comparePart.hidden = false;
    comparePart.querySelector(".outcome").textContent = `${file.name} is no report: ${error.message}`;
    comparePart.querySelector("tbody").replaceChildren();
  }
  comparePart.scrollIntoView({ block: "nearest" });
});
