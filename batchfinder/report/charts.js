// Charts as SVG: bars, a heat map, areas over time, and a line. Their colours are the page's, so that they follow it from
// light to dark; texts are never cut but go on in another line.

const SVG = "http://www.w3.org/2000/svg";
const LINE = 16; // the height of a line of text, and what is left free beside one, in pixels
const GAP = 8;
const element = (id) => document.getElementById(id);

const maker = (create) => (name, settings = {}, ...children) => {
  const made = create(name);
  for (const [key, value] of Object.entries(settings)) {
    if (key.startsWith("on") && value) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};
const make = maker((name) => document.createElement(name));
const shape = maker((name) => document.createElementNS(SVG, name));

const ruler = document.createElement("canvas").getContext("2d");
const widthOf = (text) => {
  ruler.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
};

// The lines that a text takes within so many pixels, broken within words where they are longer.
function linesOf(text, room) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (widthOf(longer) <= room) {
      lines[lines.length - 1] = longer;
      continue;
    }
    if (lines.at(-1)) lines.push("");
    let rest = word;
    while (rest.length > 1 && widthOf(rest) > room) {
      let end = rest.length - 1;
      while (end > 1 && widthOf(rest.slice(0, end)) > room) end -= 1;
      lines[lines.length - 1] = rest.slice(0, end);
      lines.push("");
      rest = rest.slice(end);
    }
    lines[lines.length - 1] = rest;
  }
  return lines;
}

// Where a value lies between two pixels; `invert` is the way back.
function scale([low, high], [from, to]) {
  const place = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  place.invert = (at) => low + ((at - from) / (to - from || 1)) * (high - low);
  return place;
}

// Round figures from 0 up to the highest, about so many.
function ticksTo(high, count, whole = false) {
  const power = 10 ** Math.floor(Math.log10(high / count));
  const step = Math.max([1, 2, 5, 10].find((factor) => factor * power * count >= high) * power, whole ? 1 : 0);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
}
const figure = (value) => value.toLocaleString("en", { maximumSignificantDigits: 6 });

// A chart in place of the one that was there.
function show(id, height, name, children, width = element(id).clientWidth) {
  const picture = shape("svg", { width, height, role: "group", "aria-label": name }, ...children);
  element(id).replaceChildren(picture);
  return picture;
}

function words(lines, x, middle, settings = {}) {
  const first = middle - ((lines.length - 1) * LINE) / 2 + 4;
  return shape("text", { "text-anchor": "end", class: "label", ...settings },
               ...lines.map((line, i) => shape("tspan", { x, y: first + i * LINE }, line)));
}

// The axis at the bottom: lines up to the top, figures and a title.
function axisBelow(x, ticks, bottom, middle, title, text = figure) {
  return [
    ...ticks.flatMap((tick) => [
      shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: bottom }),
      shape("text", { class: "label", x: x(tick), y: bottom + LINE, "text-anchor": "middle" }, text(tick)),
    ]),
    shape("text", { class: "label", x: middle, y: bottom + 2.3 * LINE, "text-anchor": "middle" }, title),
  ];
}
function axisLeft(y, ticks, left, right, title) {
  const [low, high] = [y(ticks[0]), y(ticks.at(-1))];
  return [
    ...ticks.flatMap((tick) => [
      shape("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      shape("text", { class: "label", x: left - GAP, y: y(tick) + 4, "text-anchor": "end" }, figure(tick)),
    ]),
    shape("text", { class: "label", transform: `translate(12 ${(low + high) / 2}) rotate(-90)`, "text-anchor": "middle" }, title),
  ];
}
const BELOW = 2.7 * LINE; // what an axis takes

// Rows with labels on the left: how wide those are, their lines, and how high each row is.
function rowsOf(labels, width, least) {
  const room = Math.min(Math.max(...labels.map(widthOf)) + 1, 0.42 * width);
  const lines = labels.map((label) => linesOf(label, room));
  let top = 0;
  const rows = lines.map((each) => {
    const height = Math.max(least, each.length * LINE + GAP);
    top += height;
    return { lines: each, top: top - height, height, middle: top - height / 2 };
  });
  return { left: room + GAP, rows, bottom: top };
}

// Horizontal bars, each with its figure at its end. A bar: label, value, text, colour, description and, where it can be
// chosen, onclick.
function drawBars(id, bars, title, whole = false) {
  const width = element(id).clientWidth;
  const { left, rows, bottom } = rowsOf(bars.map((bar) => bar.label), width, 26);
  const right = width - Math.max(...bars.map((bar) => widthOf(bar.text))) - 2 * GAP;
  const most = Math.max(...bars.map((bar) => bar.value), 1e-9);
  const x = scale([0, most], [left, right]);
  const ticks = ticksTo(most, Math.max(2, Math.min(6, Math.floor((right - left) / 80))), whole);
  show(id, bottom + BELOW, title, [
    ...axisBelow(x, ticks, bottom, (left + right) / 2, title),
    ...bars.flatMap((bar, i) => {
      const { lines, top, height, middle } = rows[i];
      const settings = { role: "img", "aria-label": bar.description, "data-tip": bar.tip ?? bar.description, onclick: bar.onclick,
                         class: bar.onclick ? "bar chosen-by-click" : "bar", style: `fill: ${bar.colour}` };
      return [
        words(lines, left - GAP, middle),
        shape("rect", { ...settings, x: left, y: top + 3, height: height - 6, width: Math.max(1, x(bar.value) - left) }),
        shape("text", { class: "label", x: x(bar.value) + 5, y: middle + 4 }, bar.text),
      ];
    }),
  ]);
}

// From dark to bright, as bright as the value is high, for those who see no colours too: matplotlib's viridis.
const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
function viridis(share) {
  const at = Math.min(share, 1) * (VIRIDIS.length - 1), index = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[index].map((low, i) => Math.round(low + (VIRIDIS[index + 1][i] - low) * (at - index)));
}

// A cell: row and column (their labels), value, text, description and onclick.
function drawGrid(id, cells, columns, title) {
  const labels = [...new Set(cells.map((cell) => cell.row))];
  const { left, rows, bottom } = rowsOf(labels, element(id).clientWidth, 28);
  const least = Math.max(...cells.map((cell) => widthOf(cell.text)), ...columns.map(widthOf)) + GAP;
  const width = Math.max(element(id).clientWidth, left + least * columns.length);
  const each = (width - left) / columns.length;
  const most = Math.max(...cells.map((cell) => cell.value), 1);
  show(id, bottom + BELOW, title, [
    ...rows.map(({ lines, middle }) => words(lines, left - GAP, middle)),
    ...cells.flatMap((cell) => {
      const { top, height, middle } = rows[labels.indexOf(cell.row)], x = left + each * columns.indexOf(cell.column);
      const colour = viridis(Math.log1p(cell.value) / Math.log1p(most));
      const bright = colour[0] * 0.299 + colour[1] * 0.587 + colour[2] * 0.114 > 130;
      return [
        shape("rect", { x: x + 0.5, y: top + 0.5, width: each - 1, height: height - 1, class: "chosen-by-click",
                        style: `fill: rgb(${colour})`, role: "img", "aria-label": cell.description, "data-tip": cell.tip,
                        onclick: cell.onclick }),
        shape("text", { x: x + each / 2, y: middle + 4, "text-anchor": "middle", class: "figure",
                        style: `fill: ${bright ? "#000000" : "#ffffff"}` }, cell.text),
      ];
    }),
    ...columns.map((column, i) =>
      shape("text", { class: "label", x: left + each * (i + 0.5), y: bottom + LINE, "text-anchor": "middle" }, column)),
    shape("text", { class: "label", x: (left + width) / 2, y: bottom + 2.3 * LINE, "text-anchor": "middle" }, title),
  ], width);
}

// Layers upon each other, each constant from one position to the next. Returns the scale, and what moves the cursor.
// layers: name, colour, values; marks: position, end, name, label; limit: value and label, or nothing.
function drawAreas(id, positions, layers, marks, limit, titles) {
  const width = element(id).clientWidth, top = 1.4 * LINE, bottom = 300, right = width - 2;
  const sums = positions.map(() => 0);
  const stacked = layers.map((layer) => layer.values.map((value, i) => [sums[i], (sums[i] += value)]));
  const most = Math.max(...sums, limit?.value ?? 0, 1e-9);
  const ticks = ticksTo(most, 6);
  const left = Math.max(...ticks.map((tick) => widthOf(figure(tick)))) + GAP + 20;
  const x = scale([0, positions.at(-1) || 1], [left, right]), y = scale([0, most], [bottom, top]);
  const areas = layers.map((layer, number) => {
    const edge = (side) => positions.flatMap((position, i) => {
      const height = y(stacked[number][i][side]).toFixed(1);
      return [`${x(position).toFixed(1)} ${height}`, `${x(positions[i + 1] ?? position).toFixed(1)} ${height}`];
    });
    return shape("path", { class: "area", style: `fill: ${layer.colour}`, d: `M${[...edge(1), ...edge(0).reverse()].join("L")}Z`,
                           role: "img", "aria-label": layer.name });
  });
  const cursor = shape("line", { class: "cursor", y1: top, y2: bottom });
  show(id, bottom + 1.6 * LINE, titles.up, [
    ...axisLeft(y, ticks, left, right, titles.up),
    ...areas,
    ...marks.flatMap((mark) => [
      shape("line", { class: "mark", x1: x(mark.position), x2: x(mark.position), y1: top, y2: bottom, "data-tip": mark.label }),
      ...(x(mark.end) - x(mark.position) > widthOf(mark.name) + 4
        ? [shape("text", { class: "label", x: x((mark.position + mark.end) / 2), y: top - 5, "text-anchor": "middle" }, mark.name)]
        : []),
    ]),
    ...(limit ? [shape("line", { class: "limit", x1: left, x2: right, y1: y(limit.value), y2: y(limit.value), "data-tip": limit.label })] : []),
    shape("text", { class: "label", x: (left + right) / 2, y: bottom + LINE, "text-anchor": "middle" }, titles.across),
    cursor,
  ]);
  element(id).append(make("ul", { class: "legend" }, ...layers.map((layer) =>
    make("li", {}, make("span", { style: `background: ${layer.colour}` }), layer.name))));
  const move = (position) => {
    cursor.setAttribute("x1", x(position));
    cursor.setAttribute("x2", x(position));
  };
  return { x, move };
}

// Points with bars for their spread, over sizes that double. A point: at, value, low, high, description, chosen.
function drawLine(id, points, titles) {
  const width = element(id).clientWidth, top = 2 * LINE, bottom = 230, right = width - 24;
  const most = Math.max(...points.map((point) => point.high));
  const ticks = ticksTo(most, 5);
  const left = Math.max(...ticks.map((tick) => widthOf(figure(tick)))) + GAP + 36;
  const place = scale([Math.log2(points[0].at), Math.log2(points.at(-1).at)], [left, right]);
  const x = (size) => place(Math.log2(size)), y = scale([0, most], [bottom, top]);
  let end = -Infinity;
  const named = points.map((point) => point.at).filter((size) => {
    const half = widthOf(figure(size)) / 2 + 3, fits = x(size) - half > end;
    if (fits) end = x(size) + half;
    return fits;
  });
  show(id, bottom + BELOW, titles.up, [
    ...axisLeft(y, ticks, left - 12, right + 12, titles.up),
    ...named.map((size) => shape("text", { class: "label", x: x(size), y: bottom + LINE, "text-anchor": "middle" }, figure(size))),
    shape("text", { class: "label", x: (left + right) / 2, y: bottom + 2.3 * LINE, "text-anchor": "middle" }, titles.across),
    ...points.map((point) => shape("line", { class: "line", x1: x(point.at), x2: x(point.at), y1: y(point.low), y2: y(point.high) })),
    shape("polyline", { class: "line", points: points.map((point) => `${x(point.at)},${y(point.value)}`).join(" ") }),
    ...points.flatMap((point) => [
      shape("circle", { class: "point", cx: x(point.at), cy: y(point.value), r: 4, role: "img", "aria-label": point.description,
                        "data-tip": point.description }),
      ...(point.chosen
        ? [shape("circle", { class: "line", cx: x(point.at), cy: y(point.value), r: 8 }),
           shape("text", { class: "label chosen", x: x(point.at), y: y(point.value) - 14, "text-anchor": "middle" }, figure(point.at))]
        : []),
    ]),
  ]);
}

// What a mark stands for, beside the pointer.
document.addEventListener("pointerover", (event) => {
  const tip = element("tip"), text = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = tip.style.top = "0"; // from where it is as wide as it may be
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${event.clientY + height + 20 > innerHeight ? event.clientY - height - 8 : event.clientY + 16}px`;
});
addEventListener("resize", () => { element("tip").hidden = true; });
