// The page of batchfinder's results: filters, a heat map, a sortable table, and the details of one cell.

const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const element = (id) => document.getElementById(id);
const bytes = (size) => {
  if (size === null || size === undefined) return "";
  return size >= GIB ? `${(size / GIB).toFixed(2)} GiB` : `${(size / 2 ** 20).toFixed(2)} MiB`;
};
const whole = (count) => (count === null || count === undefined ? "" : count.toLocaleString("en"));

function make(name, settings = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(settings)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Charts: each is drawn again where the colours change, and its old view given up.
const views = {};
async function draw(id, spec) {
  views[id]?.finalize();
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
  const config = {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: "transparent" },
    axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: soft, tickColor: soft, labelFontSize: 12,
            titleFontSize: 12, titleFontWeight: "normal", labelLimit: 260 },
    legend: { labelColor: ink, titleColor: ink, labelFontSize: 12, titleFontWeight: "normal" },
    text: { color: ink, fontSize: 12 },
    rule: { color: ink },
  };
  const full = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", autosize: { type: "fit", contains: "padding" },
                 width: "container", config, ...spec };
  const { view } = await window.vegaEmbed(element(id), full, { actions: false, renderer: "svg" });
  views[id] = view;
  return view;
}

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
const state = { chosen: 0, sort: null, descending: false, filter: {} };

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

async function drawHeatMap() {
  const cells = shown();
  const vary = Object.keys(FILTERS).filter((name) => new Set(cells.map((cell) => cell[name])).size > 1);
  const label = (cell) => (vary.length ? vary.map((name) => cell[name]).join(", ") : cell.gpu);
  const most = Math.max(...cells.map((cell) => cell.batch_size), 1);
  const values = cells.map((cell) => ({
    row: label(cell), "seq len": cell.seq_len === null ? "-" : cell.seq_len, batch: cell.batch_size,
    cell: data.cells.indexOf(cell), peak: bytes(cell.peak_bytes),
    bright: Math.log1p(cell.batch_size) > 0.55 * Math.log1p(most),
    description: `${cell.model} on ${cell.gpu}, seq len ${cell.seq_len ?? "-"}: ${whole(cell.batch_size)}`,
  }));
  element("heat-map").hidden = values.length < 2;
  if (values.length < 2) return;
  const y = { field: "row", type: "nominal", sort: null, title: null };
  const x = { field: "seq len", type: "ordinal", sort: "ascending", title: "sequence length", axis: { labelAngle: 0 } };
  const view = await draw("heat-map", {
    height: 45 + 28 * new Set(values.map((value) => value.row)).size,
    data: { values },
    encoding: { x, y, description: { field: "description" } },
    layer: [
      { mark: { type: "rect", cursor: "pointer" },
        encoding: {
          color: { field: "batch", type: "quantitative", legend: null,
                   scale: { type: "symlog", domain: [0, most], scheme: "viridis" } },
          tooltip: [{ field: "row", title: " " }, { field: "seq len" }, { field: "batch", title: "max batch" },
                    { field: "peak", title: "peak reserved" }] } },
      { mark: { type: "text", cursor: "pointer" },
        encoding: {
          text: { field: "batch", type: "quantitative", format: "," },
          color: { condition: { test: "datum.bright", value: "#000000" }, value: "#ffffff" } } },
    ],
  });
  view.addEventListener("click", (event, item) => {
    if (item?.datum?.cell !== undefined) select(item.datum.cell, true);
  });
}

function drawCells() {
  drawTable();
  return drawHeatMap();
}

// The details of one cell.
function select(index, moved = false) {
  state.chosen = index;
  for (const row of element("table").querySelectorAll("tbody tr")) {
    if (Number(row.dataset.cell) === index) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
  const drawn = drawCell(data.cells[index]);
  if (moved) {
    element("cell-heading").focus({ preventScroll: true });
    element("cell").scrollIntoView({ behavior: "auto", block: "start" });
  }
  return drawn;
}

async function drawCell(cell) {
  element("cell-heading").textContent = cell.heading;
  element("facts").replaceChildren(
    ...cell.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );
  element("assumed-part").hidden = !cell.unmodelled.length;
  element("assumed").replaceChildren(...cell.unmodelled.map((words) => make("li", {}, words)));
  await Promise.all([drawTimeline(cell), drawKinds(cell), drawChanges(cell), drawSpeed(cell)]);
}

function stageAt(timeline, position) {
  let found = timeline.marks[0];
  for (const mark of timeline.marks) if (mark[0] <= position) found = mark;
  return found;
}

async function drawTimeline(cell) {
  const timeline = cell.timeline;
  element("timeline-part").hidden = !timeline;
  if (!timeline) return;
  const kinds = Object.keys(timeline.by_kind);
  const totals = timeline.positions.map((_, i) => kinds.reduce((sum, kind) => sum + timeline.by_kind[kind][i], 0));
  const peak = totals.indexOf(Math.max(...totals));
  const values = timeline.positions.flatMap((position, i) =>
    kinds.map((kind, order) => ({ position, kind, order, gib: (timeline.by_kind[kind][i] * timeline.unit) / GIB })),
  );
  const last = timeline.positions.at(-1);
  const wide = element("timeline").clientWidth;
  const starts = timeline.marks.map(([position, step, stage], i) => {
    const end = timeline.marks[i + 1]?.[0] ?? last;
    const room = ((end - position) / Math.max(1, last)) * wide;
    return { position, middle: (position + end) / 2, label: step < 0 ? stage : `step ${step}, ${stage}`,
             name: room > 8 * stage.length ? stage : "" };
  });
  const x = { field: "position", type: "quantitative", scale: { domain: [0, last], nice: false },
              axis: { labels: false, ticks: false, grid: false, title: "allocations and releases, in order" } };
  const view = await draw("timeline", {
    height: 320,
    params: [{ name: "at", value: timeline.positions[peak] }],
    layer: [
      { data: { values },
        mark: { type: "area", interpolate: "step-after", clip: true },
        encoding: {
          x, y: { field: "gib", type: "quantitative", stack: "zero", title: "GiB in tensors" },
          color: { field: "kind", type: "nominal", sort: kinds, title: null, legend: { orient: "bottom", columns: Math.max(1, Math.floor(wide / 170)) },
                   scale: { domain: kinds, range: kinds.map((kind) => data.colours[kind]) } },
          order: { field: "order" } } },
      { data: { values: starts }, mark: { type: "rule", opacity: 0.25 },
        encoding: { x, tooltip: { field: "label" } } },
      { data: { values: starts }, mark: { type: "text", baseline: "bottom", dy: -3 },
        encoding: { x: { ...x, field: "middle" }, y: { value: 0 }, text: { field: "name" } } },
      ...(cell.usable_bytes && cell.usable_bytes / GIB < 1.6 * (totals[peak] * timeline.unit) / GIB
        ? [{ data: { values: [{ usable: cell.usable_bytes / GIB }] }, mark: { type: "rule", strokeDash: [6, 4] },
             encoding: { y: { field: "usable", type: "quantitative" }, tooltip: { field: "usable", title: "usable, GiB" } } }]
        : []),
      { data: { values: [{}] }, transform: [{ calculate: "at", as: "position" }], mark: { type: "rule", size: 2 },
        encoding: { x } },
    ],
  });
  const slider = element("position");
  slider.max = timeline.positions.length - 1;
  const show = (index) => {
    const position = timeline.positions[index];
    slider.value = index;
    view.signal("at", position).run();
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
  slider.oninput = () => show(Number(slider.value));
  element("timeline").onpointermove = (event) => {
    const picture = element("timeline").querySelector("svg").getBoundingClientRect();
    const position = view.scale("x").invert(event.clientX - picture.left - view.origin()[0]);
    let nearest = 0;
    for (const [index, each] of timeline.positions.entries()) if (each <= position) nearest = index;
    show(nearest);
  };
  show(peak);
}

// A scale whose longest bar leaves room for its figure.
const roomFor = (figures) => {
  const room = window.innerWidth < 640 ? 1.4 : 1.18;
  return { domain: [0, room * Math.max(...figures, 1e-9)], nice: false };
};

async function drawKinds(cell) {
  element("kinds-part").hidden = !cell.kinds;
  if (!cell.kinds) return;
  const values = Object.entries(cell.kinds).map(([kind, size]) => ({
    kind, gib: size / GIB, text: bytes(size), description: `${kind}: ${bytes(size)}`,
  }));
  const kinds = values.map((value) => value.kind);
  await draw("kinds", {
    height: 45 + 26 * values.length,
    data: { values },
    encoding: { y: { field: "kind", type: "nominal", sort: kinds, title: null },
                x: { field: "gib", type: "quantitative", title: "GiB", scale: roomFor(values.map((value) => value.gib)) },
                description: { field: "description" } },
    layer: [
      { mark: "bar", encoding: { color: { field: "kind", legend: null,
        scale: { domain: kinds, range: kinds.map((kind) => data.colours[kind]) } } } },
      { mark: { type: "text", align: "left", dx: 4 }, encoding: { text: { field: "text" } } },
    ],
  });
}

async function drawChanges(cell) {
  const changes = cell.changes;
  element("changes-part").hidden = !changes;
  if (!changes) return;
  element("changes-heading").textContent = data.changes_heading;
  const label = (change) => change.change || "as it is";
  const could = changes.filter((change) => change.max_batch_size !== null);
  const values = could.map((change) => ({ change: label(change), batch: change.max_batch_size, now: !change.change,
                                          description: `${label(change)}: largest batch ${change.max_batch_size}` }));
  const style = getComputedStyle(document.documentElement);
  await draw("changes", {
    height: 45 + 26 * values.length,
    data: { values },
    encoding: { y: { field: "change", type: "nominal", sort: null, title: null },
                x: { field: "batch", type: "quantitative", title: "largest batch",
                     axis: { tickCount: 5, labelOverlap: true, labelSeparation: 6 },
                     scale: roomFor(values.map((value) => value.batch)) },
                description: { field: "description" } },
    layer: [
      { mark: "bar", encoding: { color: { condition: { test: "datum.now", value: style.getPropertyValue("--soft").trim() },
                                          value: style.getPropertyValue("--accent").trim() } } },
      { mark: { type: "text", align: "left", dx: 4 }, encoding: { text: { field: "batch", format: "," } } },
    ],
  });
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

async function drawSpeed(cell) {
  const found = cell.throughput;
  element("speed-part").hidden = !found;
  if (!found) return;
  element("speed-words").textContent = found.words;
  const figure = (rate) => rate.toLocaleString("en", rate >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
  const rates = found.rates.map(([size, rate, spread]) => {
    const share = `${(100 * spread).toFixed(1)} %`;
    return { size, rate, share, low: Math.max(0, rate * (1 - spread)), high: rate * (1 + spread), chosen: size === found.full_speed,
             description: `batch size ${size}: ${figure(rate)} samples per second, spread ${share}` };
  });
  const sizes = rates.map(({ size }) => size);
  const x = { field: "size", type: "quantitative", title: "batch size", axis: { grid: false, format: ",", values: sizes, labelOverlap: true },
              scale: { type: "log", base: 2, domain: [sizes[0], sizes.at(-1)], nice: false, padding: 12 } };
  const y = { field: "rate", type: "quantitative", title: "samples per second", scale: { zero: true } };
  const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
  await draw("speed", {
    height: 260,
    data: { values: rates },
    encoding: { x, y, description: { field: "description" } },
    layer: [
      { mark: { type: "rule", color: accent, strokeWidth: 2 }, encoding: { y: { ...y, field: "low" }, y2: { field: "high" } } },
      { mark: { type: "line", color: accent } },
      { mark: { type: "point", filled: true, size: 40, opacity: 1, color: accent }, encoding: { tooltip: { field: "description", title: " " } } },
      { transform: [{ filter: "datum.chosen" }], mark: { type: "point", size: 220, strokeWidth: 2, color: accent } },
      { transform: [{ filter: "datum.chosen" }], mark: { type: "text", dy: -18, fontWeight: "bold" },
        encoding: { text: { field: "size", format: "," } } },
    ],
  });
  element("speed-table").replaceChildren(
    make("thead", {}, make("tr", {}, ...["batch size", "samples/s", "spread"].map((name) => make("th", { scope: "col", class: "number" }, name)))),
    make("tbody", {}, ...rates.map(({ size, rate, share, chosen }) => make("tr", { "aria-current": chosen ? "true" : null },
      make("th", { scope: "row", class: "number" }, whole(size)),
      make("td", { class: "number" }, figure(rate)), make("td", { class: "number" }, share)))),
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
async function drawAll() {
  delete document.documentElement.dataset.ready;
  if (data.cells.length > 1) await drawCells();
  if (data.cells.length) await select(state.chosen);
  document.documentElement.dataset.ready = "true";
}
element("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  applyTheme();
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

applyTheme();
element("conditions").textContent = data.conditions;
element("cells").hidden = data.cells.length < 2;
if (!data.cells.length) element("cell-heading").textContent = "no cells";
drawFilters();
await drawAll();
