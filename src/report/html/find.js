// Finds checkpoints by what is typed: parts of the id, the verdict, the op.
const find = document.getElementById("find"), found = document.getElementById("found");
const FOUND_MAX = 12;

function matches(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  return data.checkpoints.filter((item) => {
    const all = `${item.id} ${item.verdict} ${item.op || ""}`.toLowerCase();
    return words.every((word) => all.includes(word));
  });
}

function showFound() {
  const items = matches(find.value);
  const ids = items && new Set(items.map((item) => item.id));
  for (const link of links) link.classList.toggle("dim", Boolean(ids) && !ids.has(link.dataset.id));
  found.hidden = !items;
  if (!items) return;
  const entries = items.slice(0, FOUND_MAX).map((item) =>
    el("li", {}, el("a", { href: `#row-${item.id}`, "data-id": item.id }, item.id), ` ${item.verdict}`));
  const more = items.length - entries.length;
  found.replaceChildren(...entries, more > 0 ? el("li", { class: "more" }, `and ${more} more`) : "", items.length ? "" : el("li", {}, "no checkpoint has that"));
}

find.addEventListener("input", showFound);
find.addEventListener("keydown", (event) => {
  const first = (matches(find.value) || [])[0];
  if (event.key === "Enter" && first) select(first.id);
  if (event.key === "Escape") {
    find.value = "";
    showFound();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input")) return;
  event.preventDefault();
  find.focus();
});
