// The page of batchfinder's results: filters, a chart, a sortable table, and the details of one cell. charts.js comes first.

const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const bytes = (size) => {
  if (size === null || size === undefined) return "";
  return size >= GIB ? `${(size / GIB).toFixed(2)} GiB` : `${(size / 2 ** 20).toFixed(2)} MiB`;
};
const whole = (count) => (count === null || count === undefined ? "" : count.toLocaleString("en"));

const COLUMNS = [
  { name: "model", of: (cell) => cell.model },
  { name: "GPU", of: (cell) => cell.gpu },
  { name: "seq len", of: (cell) => cell.seq_len, number: true },
  { name: "technique", of: (cell) => cell.technique },
  { name: "max batch", of: (cell) => cell.batch_size, number: true },
  { name: "peak reserved", of: (cell) => cell.peak_bytes, show: bytes, number: true },
  { name: "usable", of: (cell) => cell.usable_bytes, show: bytes, number: true },
  { name: "found by", of: (cell) => cell.source },
];
const FILTERS = { model: "model", gpu: "GPU", technique: "technique" };
const state = { chosen: 0, moment: null, sort: null, descending: false, filter: {} };

const shown = () =>
  data.cells.filter((cell) => Object.entries(state.filter).every(([name, value]) => !value || cell[name] === value));

function drawFilters() {
  for (const [name, label] of Object.entries(FILTERS)) {
    const values = [...new Set(data.cells.map((cell) => cell[name]))];
    if (values.length < 2) continue;
    const select = make("select", { id: `filter-${name}`, onchange: (event) => {
      state.filter[name] = event.target.value;
      drawCells();
    } }, make("option", { value: "" }, "all"));
    select.append(...values.map((value) => make("option", { value }, value)));
    element("filters").append(make("label", {}, label, select));
  }
}

function drawTable() {
  const column = COLUMNS.find((each) => each.name === state.sort);
  const cells = [...shown()];
  if (column) {
    const sign = state.descending ? -1 : 1;
    cells.sort((a, b) => {
      const [left, right] = [column.of(a), column.of(b)];
      if (left === right) return 0;
      if (left === null || right === null) return left === null ? 1 : -1;
      return sign * (column.number ? left - right : String(left).localeCompare(String(right)));
    });
  }
  const heads = COLUMNS.map((each) => {
    const order = each.name === state.sort ? (state.descending ? "descending" : "ascending") : "none";
    const sort = () => {
      state.descending = each.name === state.sort ? !state.descending : false;
      state.sort = each.name;
      drawTable();
      element("table").querySelectorAll("thead button")[COLUMNS.indexOf(each)].focus();
    };
    return make("th", { scope: "col", "aria-sort": order, class: each.number ? "number" : null },
                make("button", { type: "button", onclick: sort }, each.name));
  });
  const rows = cells.map((cell) => {
    const index = data.cells.indexOf(cell);
    const values = COLUMNS.slice(1).map((each) => {
      const show = each.show ?? (each.number ? whole : (value) => value ?? "");
      return make("td", { class: each.number ? "number" : null }, show(each.of(cell)));
    });
    const choose = make("button", { type: "button", onclick: () => select(index, true) }, cell.model);
    return make("tr", { "aria-current": index === state.chosen ? "true" : null, "data-cell": index },
                make("th", { scope: "row" }, choose), ...values);
  });
  element("table").replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
  element("count").textContent = `${cells.length} of ${data.cells.length} cells`;
}

// Bars where all are of one length, else a heat map over lengths.
function drawSizes() {
  const cells = shown();
  const vary = Object.keys(FILTERS).filter((name) => new Set(cells.map((cell) => cell[name])).size > 1);
  const lengths = [...new Set(cells.map((cell) => cell.seq_len))].sort((a, b) => a - b);
  const marks = cells.map((cell) => {
    const row = vary.length ? vary.map((name) => cell[name]).join(", ") : cell.gpu;
    const length = cell.seq_len === null ? "-" : String(cell.seq_len);
    const peak = cell.peak_bytes ? `\npeak reserved: ${bytes(cell.peak_bytes)}` : "";
    return {
      row, label: row, column: length, value: cell.batch_size, text: whole(cell.batch_size), colour: "var(--accent)",
      onclick: () => select(data.cells.indexOf(cell), true),
      description: `${cell.model} on ${cell.gpu}, seq len ${length}: ${whole(cell.batch_size)}`,
      tip: `${row}\nseq len: ${length}\nmax batch: ${whole(cell.batch_size)}${peak}`,
    };
  });
  element("sizes").hidden = marks.length < 2;
  if (marks.length < 2) return;
  if (lengths.length > 1) drawGrid("sizes", marks, lengths.map((length) => String(length ?? "-")), "sequence length");
  else drawBars("sizes", marks, lengths[0] === null ? "largest batch" : `largest batch at ${lengths[0]}`, true);
}

function drawCells() {
  drawTable();
  drawSizes();
}

// The details of one cell.
function select(index, moved = false) {
  state.chosen = index;
  state.moment = null;
  for (const row of element("table").querySelectorAll("tbody tr")) {
    if (Number(row.dataset.cell) === index) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
  drawCell(data.cells[index]);
  if (moved) {
    element("cell-heading").focus({ preventScroll: true });
    element("cell").scrollIntoView({ behavior: "auto", block: "start" });
  }
}

function drawCell(cell) {
  element("cell-heading").textContent = cell.heading;
  element("facts").replaceChildren(
    ...cell.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );
  element("assumed-part").hidden = !cell.unmodelled.length;
  element("assumed").replaceChildren(...cell.unmodelled.map((words) => make("li", {}, words)));
  for (const drawPart of [drawTimeline, drawKinds, drawChanges, drawSpeed]) drawPart(cell);
}

function stageAt(timeline, position) {
  let found = timeline.marks[0];
  for (const mark of timeline.marks) if (mark[0] <= position) found = mark;
  return found;
}

function drawTimeline(cell) {
  const timeline = cell.timeline;
  element("timeline-part").hidden = !timeline;
  if (!timeline) return;
  const kinds = Object.keys(timeline.by_kind);
  const totals = timeline.positions.map((_, i) => kinds.reduce((sum, kind) => sum + timeline.by_kind[kind][i], 0));
  const peak = totals.indexOf(Math.max(...totals));
  const gib = (count) => (count * timeline.unit) / GIB;
  const layers = kinds.map((kind) => ({ name: kind, colour: data.colours[kind], values: timeline.by_kind[kind].map(gib) }));
  const marks = timeline.marks.map(([position, step, stage], i) => ({
    position, end: timeline.marks[i + 1]?.[0] ?? timeline.positions.at(-1), name: stage, label: step < 0 ? stage : `step ${step}, ${stage}`,
  }));
  const usable = (cell.usable_bytes ?? 0) / GIB;
  const limit = usable && usable < 1.6 * gib(totals[peak]) ? { value: usable, label: `usable: ${bytes(cell.usable_bytes)}` } : null;
  const { x, move } = drawAreas("timeline", timeline.positions, layers, marks, limit,
                                { up: "GiB in tensors", across: "allocations and releases, in order" });
  const slider = element("position");
  slider.max = timeline.positions.length - 1;
  const showMoment = (index) => {
    const position = timeline.positions[index];
    state.moment = slider.value = index;
    move(position);
    const [, step, stage] = stageAt(timeline, position);
    const module = timeline.names[timeline.modules[index]];
    const words = `step ${step}, ${stage}${module ? `, ${module}` : ""}: ${bytes(totals[index] * timeline.unit)} in tensors`;
    element("moment").textContent = index === peak ? `${words} (the peak)` : words;
    slider.setAttribute("aria-valuetext", words);
    const held = kinds.map((kind) => [kind, timeline.by_kind[kind][index]]).filter(([, size]) => size);
    held.sort((a, b) => b[1] - a[1]);
    element("held").replaceChildren(
      make("caption", {}, "held at this moment"),
      make("tbody", {}, ...held.map(([kind, size]) =>
        make("tr", {}, make("th", { scope: "row" }, kind),
             make("td", { class: "number" }, bytes(size * timeline.unit))))),
    );
  };
  slider.oninput = () => showMoment(Number(slider.value));
  element("timeline").onpointermove = (event) => {
    const position = x.invert(event.clientX - element("timeline").querySelector("svg").getBoundingClientRect().left);
    let nearest = 0;
    for (const [index, each] of timeline.positions.entries()) if (each <= position) nearest = index;
    showMoment(nearest);
  };
  showMoment(state.moment ?? peak);
}

function drawKinds(cell) {
  element("kinds-part").hidden = !cell.kinds;
  if (!cell.kinds) return;
  drawBars("kinds", Object.entries(cell.kinds).map(([kind, size]) => ({
    label: kind, value: size / GIB, text: bytes(size), colour: data.colours[kind], description: `${kind}: ${bytes(size)}`,
  })), "GiB");
}

function drawChanges(cell) {
  const changes = cell.changes;
  element("changes-part").hidden = !changes;
  if (!changes) return;
  element("changes-heading").textContent = data.changes_heading;
  const label = (change) => change.change || "as it is";
  const could = changes.filter((change) => change.max_batch_size !== null);
  drawBars("changes", could.map((change) => ({
    label: label(change), value: change.max_batch_size, text: whole(change.max_batch_size),
    colour: change.change ? "var(--accent)" : "var(--soft)",
    description: `${label(change)}: largest batch ${whole(change.max_batch_size)}`,
  })), "largest batch", true);
  const flops = changes.some((change) => change.flops);
  const names = ["change", "largest batch", "peak", ...(flops ? ["FLOPs"] : []), "batch of the peak"];
  const rows = changes.map((change) => make("tr", {},
    make("th", { scope: "row" }, label(change)),
    make("td", { class: "number" }, change.error ?? whole(change.max_batch_size)),
    make("td", { class: "number" }, bytes(change.peak_bytes)),
    ...(flops ? [make("td", { class: "number" }, change.flops)] : []),
    make("td", { class: "number" }, whole(change.batch_size))));
  element("changes-table").replaceChildren(
    make("thead", {}, make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: i ? "number" : null }, name)))),
    make("tbody", {}, ...rows),
  );
}

function drawSpeed(cell) {
  const found = cell.throughput;
  element("speed-part").hidden = !found;
  if (!found) return;
  element("speed-words").textContent = found.words;
  const perSecond = (rate) => rate.toLocaleString("en", rate >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
  const rates = found.rates.map(([size, rate, spread]) => {
    const share = `${(100 * spread).toFixed(1)} %`;
    return { at: size, value: rate, share, low: Math.max(0, rate * (1 - spread)), high: rate * (1 + spread),
             chosen: size === found.full_speed,
             description: `batch size ${size}: ${perSecond(rate)} samples per second, spread ${share}` };
  });
  drawLine("speed", rates, { up: "samples per second", across: "batch size" });
  element("speed-table").replaceChildren(
    make("thead", {}, make("tr", {}, ...["batch size", "samples/s", "spread"].map((name) => make("th", { scope: "col", class: "number" }, name)))),
    make("tbody", {}, ...rates.map(({ at, value, share, chosen }) => make("tr", { "aria-current": chosen ? "true" : null },
      make("th", { scope: "row", class: "number" }, whole(at)),
      make("td", { class: "number" }, perSecond(value)), make("td", { class: "number" }, share)))),
  );
}

// Light and dark: as the system says, or as chosen here.
const THEMES = ["system", "light", "dark"];
let theme = 0;
function applyTheme() {
  if (theme) document.documentElement.dataset.theme = THEMES[theme];
  else delete document.documentElement.dataset.theme;
  element("theme").textContent = `colours: ${THEMES[theme]}`;
}
function drawAll() {
  delete document.documentElement.dataset.ready;
  if (data.cells.length > 1) drawCells();
  if (data.cells.length) drawCell(data.cells[state.chosen]);
  document.documentElement.dataset.ready = "true";
}
element("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  applyTheme();
});
let drawnFor = innerWidth; // charts are as wide as the window lets them be
addEventListener("resize", () => {
  if (innerWidth === drawnFor) return;
  drawnFor = innerWidth;
  requestAnimationFrame(drawAll);
});

applyTheme();
element("conditions").textContent = data.conditions;
element("cells").hidden = data.cells.length < 2;
if (!data.cells.length) element("cell-heading").textContent = "no cells";
drawFilters();
drawAll();
