// The timeline of the report. Times are in the report's unit; the view is the interval [view.from, view.to].
const { boxes, lanes, groups } = data;
const whole = (column) => Float64Array.from(Array.isArray(column) ? column : new Array(column.size).fill(column.all));
for (const name in boxes) boxes[name] = whole(boxes[name]);
const TALL = groups.length > 40 ? 14 : groups.length > 16 ? 20 : 32, THIN = groups.length > 16 ? 4 : 9, GAP = 8;
const LOW = 0.55; // height of communication on a computing lane
const NARROW = 4, DOZEN = 12; // pixels below which boxes become bands; see bands.py
const view = { from: 0, to: data.end, cursor: null };
const rank = (number) => Object.keys(data.colors).indexOf(data.kinds[number]);
const stacked = [...data.kinds.keys()].sort((one, other) => rank(other) - rank(one)); // from the bottom of a band
const fills = data.kinds.map((kind) => data.ordinals.map((_, shade) => shaded(data.colors[kind], shade)));
const SHADES = data.ordinals.length;
let hit = new Uint8Array(boxes.lane.length).fill(1);

// -- layout: lanes from top to bottom ---------------------------------------------------------------
for (const lane of lanes) lane.boxes = [];
for (let i = 0; i < boxes.lane.length; i++) lanes[boxes.lane[i]].boxes.push(i);
let height = 4;
lanes.forEach((lane, i) => {
  if (i && lanes[i - 1].group !== lane.group) height += GAP;
  lane.top = height;
  lane.height = lane.compute ? (lane.measured ? TALL * 0.8 : TALL) : THIN;
  const lengths = lane.boxes.map((b) => boxes.end[b] - boxes.start[b]);
  lane.longest = lengths.reduce((most, length) => Math.max(most, length), 0);
  lane.mean = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;
  height += lane.height + (lane.compute && lanes[i + 1]?.measured ? 2 : 0);
});
function stagesText({ stages }) {
  if (!stages.length) return "";
  return (stages.length > 1 ? "stages " : "stage ") + stages.slice(0, 4).join(", ") + (stages.length > 4 ? ", …" : "");
}
const besides = groups.map((group) => [stagesText(group), (100 * (1 - group.bubble)).toFixed(0) + "% busy"].filter(Boolean).join(" · "));
const GUTTER = TALL < 30 ? 64 : Math.max(76, ...besides.map((text) => 18 + 5.9 * text.length));

// -- looking around ---------------------------------------------------------------------------------
const scaleOf = (width) => (width - GUTTER) / (view.to - view.from);
const timeAt = ({ x, width }) => view.from + (x - GUTTER) / scaleOf(width);
const timelineWidth = () => $("timeline").clientWidth;
function setView(from, to) {
  const span = Math.min(Math.max(to - from, data.end * 1e-6), data.end);
  view.from = Math.min(Math.max(from, 0), data.end - span);
  view.to = view.from + span;
  redraw();
}
function zoom(factor, place) {
  const at = place ? timeAt(place) : (view.from + view.to) / 2, span = (view.to - view.from) / factor;
  setView(at - (at - view.from) / factor, at - (at - view.from) / factor + span);
}
function pan(dx) {
  const by = dx / scaleOf(timelineWidth());
  setView(view.from - by, view.to - by);
}
const reset = () => setView(0, data.end);
function frame() {
  const found = [...hit.keys()].filter((box) => hit[box]);
  const from = found.reduce((least, box) => Math.min(least, boxes.start[box]), data.end);
  const to = found.reduce((most, box) => Math.max(most, boxes.end[box]), 0), margin = (to - from) * 0.05;
  if (found.length) setView(from - margin, to + margin);
}
function nodesOf(box) {
  const { op, pass, pp, ep, mb } = boxes;
  const parts = [["PP", pp], ["EP", ep], ["MB", mb]].filter(([, column]) => column[box] >= 0).map(([name, column]) => name + "=" + column[box]);
  const head = data.passes[pass[box]] + (parts.length ? "[" + parts.join(",") + "]" : "");
  return [op[box], ...(data.more[box] || [])].map((number) => (head + " " + data.ops[number]).trim());
}
function rematch() {
  hit = hit.map((_, box) => !chosen.hidden.has(boxes.color[box]) &&
    (!chosen.words.length || matches(nodesOf(box).join(" ") + " " + data.labels[boxes.label[box]])));
  return hit.reduce((sum, found) => sum + found, 0);
}
function firstVisible(lane) {
  const from = view.from - lane.longest;
  let low = 0, high = lane.boxes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (boxes.start[lane.boxes[middle]] < from) low = middle + 1; else high = middle;
  }
  return low;
}

// -- drawing ----------------------------------------------------------------------------------------
function draw() {
  const canvas = $("timeline").firstElementChild, [pen, width] = prepared(canvas, height + 6);
  const seen = lanes.filter(({ top, height: tall }) => isOnScreen(canvas, top, top + tall));
  const scale = scaleOf(width), x = (time) => GUTTER + (time - view.from) * scale;
  for (const lane of seen) {
    pen.fillStyle = style(lane.compute ? "--idle" : "--thin");
    pen.fillRect(GUTTER, lane.top, width - GUTTER, lane.height);
  }
  drawAxis(pen, x);
  clip(pen, GUTTER, 0, width - GUTTER, height);
  const banded = seen.map((lane) => drawLane(pen, lane, scale, x)).some(Boolean);
  drawCursor(pen, x, height);
  pen.restore();
  for (const lane of seen) if (lane.compute) drawName(pen, lane);
  bandNote.hidden = !banded;
  drawMemory();
}
function drawAxis(pen, x) {
  const rough = (view.to - view.from) / 9, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const [axis, width] = prepared($("axis"), 18);
  for (let t = Math.ceil(view.from / step) * step; t <= view.to * (1 + 1e-9); t += step) {
    const tick = +t.toPrecision(12), text = timeText(tick, view.to);
    pen.fillStyle = style("--line");
    pen.fillRect(Math.round(x(tick)), 0, 1, height);
    axis.font = "11.5px " + FONT;
    const half = axis.measureText(text).width / 2;
    write(axis, text, Math.min(Math.max(x(tick), GUTTER + half), width - half), 10, "11.5px", style("--muted"));
  }
}
/** Draws boxes that can be seen, and bands of dozens of boxes in place of the others; says whether there are bands. */
function drawLane(pen, lane, scale, x) {
  const { start, end, part, parts, color, shade } = boxes, times = new Float64Array(2 * SHADES * data.kinds.length);
  const dozen = DOZEN * Math.max(1, Math.ceil((2 * NARROW) / (DOZEN * lane.mean * scale)));
  let banded = false, due = false, critical = false, open = -1, from = 0, until = 0, count = 0;
  const close = () => {
    if (count > 1) { drawBand(pen, lane, x(from), x(until), times, until - from, critical); banded = true; }
    else if (count) { drawBox(pen, lane, open, scale, x); times.fill(0); }
    [open, count, due, critical] = [-1, 0, false, false];
  };
  for (let i = firstVisible(lane); i < lane.boxes.length; i++) {
    const box = lane.boxes[i];
    if (start[box] > view.to) break;
    if (end[box] < view.from - (dozen + 1) * lane.mean) continue;
    const isNarrow = (end[box] - start[box]) * scale < NARROW, gap = (start[box] - until) * scale;
    if (count && (!isNarrow || gap > NARROW)) close();
    if (!isNarrow) { drawBox(pen, lane, box, scale, x); until = end[box]; continue; }
    if (!count) [open, from] = [box, gap > 0 && gap <= NARROW && banded ? until : start[box]];
    times[2 * (color[box] * SHADES + Math.min(shade[box], SHADES - 1)) + hit[box]] += (end[box] - start[box]) / parts[box];
    until = Math.max(until, end[box]);
    critical ||= boxes.critical[box];
    count++;
    due ||= (i + 1) % dozen === 0;
    if (due && part[box] + 1 === parts[box]) close();
  }
  close();
  pen.globalAlpha = 1;
  return banded;
}
function drawBand(pen, lane, from, to, times, length, critical) {
  const left = Math.round(from), wide = Math.max(Math.round(to) - left, 1);
  let bottom = lane.top + lane.height;
  for (const kind of stacked) for (let shade = SHADES - 1; shade >= 0; shade--) for (let found = 0; found < 2; found++) {
    const key = 2 * (kind * SHADES + shade) + found, tall = (times[key] / length) * lane.height;
    if (!tall) continue;
    times[key] = 0;
    pen.globalAlpha = found ? 1 : 0.13;
    pen.fillStyle = fills[kind][shade];
    pen.fillRect(left, bottom - tall, wide, tall);
    bottom -= tall;
  }
  drawCritical(pen, critical, left, lane.top + lane.height, wide);
}
function drawCritical(pen, critical, left, bottom, wide) {
  if (!critical || !$("critical").checked) return;
  pen.fillStyle = style("--ink");
  pen.fillRect(left, bottom - 3, wide, 3);
}
function drawBox(pen, lane, box, scale, x) {
  const { start, end, part, parts, color, shade, label, critical, blocked } = boxes, kind = data.kinds[color[box]];
  const left = x(start[box]), wide = Math.max((end[box] - start[box]) * scale, 1), share = lane.height / parts[box];
  const tall = share * (lane.compute && !data.passColors.includes(kind) ? LOW : 1);
  const top = lane.top + (part[box] + 1) * share - tall, fill = fills[color[box]][Math.min(shade[box], SHADES - 1)];
  pen.globalAlpha = hit[box] ? 1 : 0.13;
  if (blocked[box] * scale > 2) drawBlocked(pen, x(start[box] - blocked[box]), left, top, tall, fill);
  const edge = Math.min(1, wide * 0.12);
  pen.fillStyle = fill;
  pen.fillRect(left, top, wide - edge, tall - (part[box] + 1 < parts[box] ? 1 : 0));
  drawCritical(pen, critical[box], left, top + tall, wide - edge);
  if (lane.compute && wide > 11 && tall >= 9) writeTask(pen, data.labels[label[box]], left + wide / 2, top + tall / 2, wide - 4, tall, inkOn(fill));
}
function drawBlocked(pen, from, to, top, tall, fill) {
  clip(pen, from, top, to - from, tall);
  pen.strokeStyle = fill;
  pen.beginPath();
  for (let at = Math.floor(from / 6) * 6 - tall; at < to; at += 6) { pen.moveTo(at, top + tall); pen.lineTo(at + tall, top); }
  pen.stroke();
  pen.restore();
}
function drawName(pen, lane) {
  const group = groups[lane.group], middle = lane.top + lane.height / 2, right = GUTTER - 10;
  if (lane.measured) return write(pen, "measured", right, middle, "11px", style("--muted"), "right");
  const isMain = lane.stream === "compute", hasSecond = TALL >= 30 && isMain;
  write(pen, isMain ? group.name : lane.stream, right, middle - (hasSecond ? 7 : 0), `600 ${TALL < 20 ? 11 : 12.5}px`, style("--ink"), "right");
  if (hasSecond) write(pen, besides[lane.group], right, middle + 8, "10.5px", style("--muted"), "right");
}
function drawCursor(pen, x, bottom) {
  if (view.cursor === null) return;
  pen.fillStyle = style("--muted");
  pen.fillRect(x(view.cursor), 0, 1, bottom);
}

// -- hovering ---------------------------------------------------------------------------------------
function tipAt(canvas, place) {
  view.cursor = place && place.x >= GUTTER ? timeAt(place) : null;
  if (!place) return "";
  if (canvas.parentElement.id === "memory") return memoryTip(place);
  const box = boxAt(place);
  return box < 0 ? "" : boxTip(box);
}
function boxAt({ x, y, width }) {
  const time = timeAt({ x, width }), slack = 3 / scaleOf(width), { start, end, part, parts, blocked } = boxes;
  const lane = lanes.find((l) => y >= l.top && y < l.top + l.height);
  if (!lane || time < view.from) return -1;
  let nearest = -1;
  for (let i = firstVisible(lane); i < lane.boxes.length; i++) {
    const box = lane.boxes[i], stripe = Math.floor(((y - lane.top) / lane.height) * parts[box]);
    if (start[box] - blocked[box] > time + slack) break;
    if (end[box] >= time && start[box] - blocked[box] <= time && stripe === part[box]) return box;
    if (Math.abs(start[box] - time) < slack) nearest = box;
  }
  return nearest;
}
function boxTip(box) {
  const { start, end, blocked, bytes, op, label, lane, color } = boxes, source = data.sources[data.ops[op[box]]], kind = data.kinds[color[box]];
  return `<b>${escape(data.labels[label[box]])}</b> ${escape(data.meanings[kind]?.replace(/^\S+ /, "") ?? "")} on ${escape(groups[lanes[lane[box]].group].name)}<br>` +
    nodesOf(box).map(escape).join("<br>") + (source ? `<br><code>${escape(source)}</code>` : "") +
    `<table>${row("starts", timeText(start[box]))}${row("takes", timeText(end[box] - start[box]))}` +
    (blocked[box] ? row("waited", timeText(blocked[box])) : "") +
    (bytes[box] ? row(lanes[lane[box]].compute && data.passColors.includes(kind) ? "keeps" : "moves", bytesText(bytes[box]) + " per device") : "") +
    "</table>";
}

// -- legend -----------------------------------------------------------------------------------------
const shades = Math.min(boxes.shade.reduce((most, shade) => Math.max(most, shade), 0), SHADES - 1);
const palest = boxes.shade.findIndex((shade) => shade >= shades); // paler than the colour that the legend has for it
for (let shade = 1; shade <= shades; shade++)
  explain(data.ordinals[shade] + (shade === shades ? " stage of its group" : ""), fills[boxes.color[palest]][shade]);
if (boxes.blocked.some(Boolean)) explain("waits for its link or its data", "", "hatch");
explain(data.note, "transparent").firstElementChild.remove();
const bandNote = explain("where tasks are too narrow to see, heights are shares of time", "transparent");
bandNote.firstElementChild.remove();
bandNote.hidden = true;
$("critical").onchange = redraw;
