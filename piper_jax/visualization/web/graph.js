// The graph of the plan. Nodes are on a grid of columns and rows; the view is a scale and the corner that it shows.
const { nodes, edges, bands } = data;
const COLUMN = 108, WIDE = 80, MARGIN = 24, GUTTER = 84; // in pixels at scale 1
const LARGEST = 2.4; // scale of a graph that would fit at a larger one
const ROW = Math.min(Math.max(58, (300 * data.columns * COLUMN) / (1300 * data.rows)), 150), TALL = ROW * 0.62; // tall if many columns
const [VALUE, TRANSFER, ORDER] = [0, 1, 2];
const world = { width: data.columns * COLUMN + 2 * MARGIN, height: data.rows * ROW + bands.length * MARGIN };
const view = { scale: 1, left: 0, top: 0, isWhole: true, hovered: -1 };
const canvas = $("graph").firstElementChild;
const fills = data.kinds.map((kind) => data.colors[kind]);
let hit = new Uint8Array(nodes.length).fill(1);

// -- layout -----------------------------------------------------------------------------------------
bands.forEach((band, number) => { band.top = band.first * ROW + number * MARGIN; band.height = band.count * ROW + MARGIN; });
for (const node of nodes) {
  const number = bands.findIndex((band) => node.row >= band.first && node.row < band.first + band.count);
  node.x = MARGIN + node.column * COLUMN + (COLUMN - WIDE) / 2;
  node.y = node.row * ROW + number * MARGIN + MARGIN / 2 + (ROW - TALL) / 2;
  [node.into, node.out] = [[], []];
}
edges.forEach(([src, dst], number) => { nodes[src].out.push(number); nodes[dst].into.push(number); });
/** The corners of each edge, as in graph_routes.py: over several columns it goes along the space between rows. */
const routes = edges.map(([src, dst], number) => {
  const [a, b] = [nodes[src], nodes[dst]], [x, y, u, v] = [a.x + WIDE, a.y + TALL / 2, b.x, b.y + TALL / 2];
  if (data.tracks[number] < 0) return [[x, y], [u, v]];
  const share = (1 + data.tracks[number]) / (data.numTracks + 1), space = share * (ROW - TALL), turn = 0.36 * (COLUMN - WIDE);
  const along = v < y ? a.y - space : a.y + TALL + space, behind = x + turn * (1.3 - share), before = u - turn * (0.7 + share);
  return [[x, y], [behind, y], [behind, along], [before, along], [before, v], [u, v]];
});

// -- looking around ---------------------------------------------------------------------------------
function size() {
  const width = canvas.parentElement.clientWidth, fitting = Math.min((width - GUTTER) / world.width, LARGEST) * world.height;
  return { width, height: Math.max(360, Math.min(innerHeight - 210, fitting)) };
}
const toScreen = (x, y) => [GUTTER + (x - view.left) * view.scale, (y - view.top) * view.scale];
function show(left, top, right, bottom) {
  const { width, height } = size();
  view.scale = Math.min((width - GUTTER) / (right - left), height / (bottom - top), LARGEST);
  view.left = (left + right) / 2 - (width - GUTTER) / view.scale / 2;
  view.top = (top + bottom) / 2 - height / view.scale / 2;
  view.isWhole = false;
  redraw();
}
function reset() {
  show(0, 0, world.width, world.height);
  view.isWhole = true;
}
window.addEventListener("resize", () => { if (view.isWhole) reset(); });
function frame() {
  const found = nodes.filter((_, number) => hit[number]);
  const [x, y] = ["x", "y"].map((axis) => found.map((node) => node[axis]));
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  if (found.length) show(least(x) - 40, least(y) - 40, most(x) + WIDE + 40, most(y) + TALL + 40);
}
function zoom(factor, place) {
  const { width, height } = size(), at = place ?? { x: (width + GUTTER) / 2, y: height / 2 };
  const x = view.left + (at.x - GUTTER) / view.scale, y = view.top + at.y / view.scale;
  view.scale = Math.min(Math.max(view.scale * factor, 0.01), 6);
  view.isWhole = false;
  [view.left, view.top] = [x - (at.x - GUTTER) / view.scale, y - at.y / view.scale];
  redraw();
}
function pan(dx, dy) {
  view.isWhole = false;
  view.left -= dx / view.scale;
  view.top -= dy / view.scale;
  redraw();
}
function rematch() {
  hit = hit.map((_, number) => !chosen.hidden.has(nodes[number].kind) && matches(nodes[number].name + " " + nodes[number].group));
  return hit.reduce((sum, found) => sum + found, 0);
}

// -- drawing ----------------------------------------------------------------------------------------
function draw() {
  const { width, height } = size(), [pen] = prepared(canvas, height);
  bands.forEach((band, number) => {
    const [, top] = toScreen(0, band.top);
    pen.fillStyle = style(number % 2 ? "--page" : "--thin");
    pen.fillRect(0, top, width, band.height * view.scale);
  });
  clip(pen, GUTTER, 0, width - GUTTER, height);
  edges.forEach((_, number) => { if (!isNear(number)) drawEdge(pen, number, width, height); });
  edges.forEach((_, number) => { if (isNear(number)) drawEdge(pen, number, width, height); });
  nodes.forEach((node, number) => drawNode(pen, node, number, width, height));
  edges.forEach((_, number) => { if (isNear(number)) drawEdgeLabel(pen, number); });
  pen.restore();
  for (const band of bands) drawBandName(pen, band, height);
}
const isNear = (number) => view.hovered >= 0 && edges[number].slice(0, 2).includes(view.hovered);
function drawEdge(pen, number, width, height) {
  const [src, dst, kind] = edges[number], points = routes[number].map(([x, y]) => toScreen(x, y)), near = isNear(number);
  const [[left, start], [right, end]] = [points[0], points.at(-1)], heights = points.map(([, y]) => y);
  if (right < GUTTER || left > width || Math.max(...heights) < 0 || Math.min(...heights) > height) return;
  pen.globalAlpha = near ? 1 : hit[src] && hit[dst] ? (view.hovered >= 0 ? 0.25 : kind === TRANSFER ? 0.85 : 0.6) : 0.06;
  pen.strokeStyle = pen.fillStyle = style(kind === TRANSFER ? "--transfer" : near ? "--ink" : "--value");
  pen.lineWidth = (near ? 2 : 1.1) * Math.min(1, Math.max(0.5, view.scale * 1.4));
  pen.setLineDash(kind === ORDER ? [4, 3] : []);
  pen.beginPath();
  pen.moveTo(left, start);
  if (points.length === 2) pen.bezierCurveTo((left + right) / 2, start, (left + right) / 2, end, right, end);
  else points.slice(1).forEach(([x, y], at) => pen.arcTo(x, y, ...(points[at + 2] ?? [x, y]), 5 * view.scale));
  pen.lineTo(right, end);
  pen.stroke();
  pen.setLineDash([]);
  const head = Math.min(7, 9 * view.scale);
  if (head > 2.5) drawHead(pen, right, end, head);
  pen.globalAlpha = 1;
}
function drawHead(pen, x, y, head) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x - head, y + head * 0.45);
  pen.lineTo(x - head, y - head * 0.45);
  pen.fill();
}
function drawNode(pen, node, number, width, height) {
  const [x, y] = toScreen(node.x, node.y), wide = WIDE * view.scale, tall = TALL * view.scale;
  if (x > width || y > height || x + wide < GUTTER || y + tall < 0) return;
  const fill = fills[node.kind];
  pen.globalAlpha = hit[number] ? 1 : 0.13;
  pen.fillStyle = fill;
  pen.beginPath();
  pen.roundRect(x, y, wide, tall, Math.min(6, 5 * view.scale));
  pen.fill();
  if (number === view.hovered) {
    [pen.strokeStyle, pen.lineWidth] = [style("--ink"), 2];
    pen.stroke();
  }
  drawNodeText(pen, node, x + wide / 2, y, wide - Math.min(8, wide * 0.15), tall, inkOn(fill));
  pen.globalAlpha = 1;
}
/** The more room, the more is written: "F0", then the node over its operation, then its source line and its group. */
function drawNodeText(pen, node, middle, top, wide, tall, ink) {
  if (tall < 30 || wide < 84) return writeTask(pen, node.short || node.head, middle, top + tall / 2, wide, tall, ink);
  let size = Math.min(14, tall * 0.3);
  const measured = () => { pen.font = `600 ${size}px ${FONT}`; return pen.measureText(node.head).width; };
  while (size > 9 && measured() > wide) size -= 0.5;
  const lines = [[node.head, `600 ${size}px`], [node.tail, `${size * 0.9}px`], [tall > 62 ? node.source || node.group : "", `${size * 0.85}px`]];
  const shown = lines.filter(([text]) => text);
  shown.forEach(([text, face], number) => {
    pen.font = `${face} ${FONT}`;
    write(pen, cut(pen, text, wide), middle, top + tall / 2 + (number - (shown.length - 1) / 2) * size * 1.35, face, ink);
  });
}
/** `text`, with as much left out in its middle as has no room. */
function cut(pen, text, wide) {
  if (pen.measureText(text).width <= wide) return text;
  for (let kept = text.length - 2; kept > 2; kept--) {
    const half = Math.ceil(kept / 2), shown = text.slice(0, half) + "…" + text.slice(text.length - (kept - half));
    if (pen.measureText(shown).width <= wide) return shown;
  }
  return "";
}
function drawEdgeLabel(pen, number) {
  const [, , kind, values, bytes] = edges[number], route = routes[number], middle = route.length / 2;
  if (kind === ORDER || view.scale < 0.5) return;
  const [x, y] = toScreen(...[0, 1].map((axis) => (route[middle - 1][axis] + route[middle][axis]) / 2));
  pen.font = "11px " + FONT;
  const text = cut(pen, values, 220) + (bytes ? "  " + bytesText(bytes) : ""), wide = pen.measureText(text).width + 10;
  [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [style("--page"), style("--line"), 1];
  pen.beginPath();
  pen.roundRect(x - wide / 2, y - 9, wide, 18, 4);
  pen.fill();
  pen.stroke();
  write(pen, text, x, y + 0.5, "11px", style("--ink"));
}
function drawBandName(pen, band, height) {
  const [, top] = toScreen(0, band.top), tall = band.height * view.scale;
  const middle = (Math.max(top, 0) + Math.min(top + tall, height)) / 2;
  if (top > height || top + tall < 0 || tall < 9) return;
  pen.font = "600 12.5px " + FONT;
  write(pen, cut(pen, band.name, GUTTER - 14), GUTTER / 2, middle - (tall > 40 ? 7 : 0), "600 12.5px", style("--ink"));
  pen.font = "10px " + FONT;
  if (tall > 40) write(pen, cut(pen, band.about.split(",")[0], GUTTER - 8), GUTTER / 2, middle + 8, "10px", style("--muted"));
}

// -- hovering ---------------------------------------------------------------------------------------
function tipAt(_, place) {
  view.hovered = place ? nodeAt(place) : -1;
  return view.hovered < 0 ? "" : nodeTip(nodes[view.hovered]);
}
function nodeAt(place) {
  const x = view.left + (place.x - GUTTER) / view.scale, y = view.top + place.y / view.scale, slack = 2 / view.scale;
  if (place.x < GUTTER) return -1;
  return nodes.findIndex((n) => x >= n.x - slack && x <= n.x + WIDE + slack && y >= n.y - slack && y <= n.y + TALL + slack);
}
function nodeTip(node) {
  const band = bands.find(({ name }) => name === node.group), about = band?.about ? ` (${band.about})` : "";
  const facts = node.facts.map(([name, value]) => row(name, escape(typeof value === "number" ? bytesText(value) : value)));
  return `<b>${escape(node.name)}</b>${node.group ? ` on ${escape(node.group + about)}` : ""}` +
    (node.source ? `<br><code>${escape(node.source)}</code>` : "") +
    `<table>${facts.join("")}${ends(node.into, 0, "from")}${ends(node.out, 1, "to")}</table>`;
}
/** A row for each of the edges, at most six; their other end is at place `end`. */
function ends(numbers, end, word) {
  const rows = numbers.slice(0, 6).map((number) => {
    const [, , kind, values, bytes] = edges[number], what = kind === ORDER ? "only order" : escape(values) + (bytes ? ", " + bytesText(bytes) : "");
    return row(word, escape(nodes[edges[number][end]].name) + `<br><span style="color:#9caab8">${what}</span>`);
  });
  return rows.join("") + (numbers.length > 6 ? row("", `and ${word} ${numbers.length - 6} more`) : "");
}

// -- legend -----------------------------------------------------------------------------------------
const has = (kind) => edges.some((edge) => edge[2] === kind);
if (has(VALUE)) explain("value on its group", "var(--value)", "edge");
if (has(TRANSFER)) explain("transfer to another group", "var(--transfer)", "edge");
if (has(ORDER)) explain("only order", "var(--value)", "edge").firstElementChild.style.borderTopStyle = "dashed";
listen(canvas);
window.page = { view, nodes, toScreen, zoom };
reset();
