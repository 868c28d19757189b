"use strict";
// Draws the report in #data. Times are in the report's unit; the view is the interval [view.from, view.to].
const data = JSON.parse(document.getElementById("data").textContent);
const whole = (column) => (Array.isArray(column) ? column : new Array(column.size).fill(column.all));
for (const name in data.boxes) data.boxes[name] = whole(data.boxes[name]);
for (const group of data.groups) group.memory.bytes = group.memory.bytes.map(whole);
const $ = (id) => document.getElementById(id);
const GUTTER = 74, AXIS = 26, GAP = 8;
const TALL = data.groups.length > 40 ? 14 : data.groups.length > 16 ? 20 : 30;
const THIN = data.groups.length > 16 ? 4 : 8, STRIP = data.groups.length > 16 ? 40 : 64;
const view = { from: 0, to: data.end, hidden: new Set(), words: [], critical: false, cursor: null };
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// -- text -----------------------------------------------------------------------------------------
function timeText(time) {
  if (data.unit !== "s") return String(+time.toPrecision(8));
  for (const [scale, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
    if (Math.abs(time) >= scale) return +(time / scale).toPrecision(4) + " " + name;
  return time ? +(time / 1e-9).toPrecision(4) + " ns" : "0";
}
function bytesText(bytes) {
  for (const [power, name] of [[3, "GiB"], [2, "MiB"], [1, "KiB"]])
    if (bytes >= 1024 ** power) return (bytes / 1024 ** power).toFixed(2) + " " + name;
  return bytes + " B";
}
function nodeText(op, pass, pp, ep, mb) {
  const parts = [["PP", pp], ["EP", ep], ["MB", mb]].filter(([, value]) => value >= 0).map(([name, value]) => name + "=" + value);
  const head = (data.passes[pass] || "") + (parts.length ? "[" + parts.join(",") + "]" : "");
  return (head + " " + data.ops[op]).trim();
}
const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

// -- layout: lanes from top to bottom ---------------------------------------------------------------
const lanes = data.lanes.map((lane) => ({ ...lane, boxes: [] }));
for (let i = 0; i < data.boxes.lane.length; i++) lanes[data.boxes.lane[i]].boxes.push(i);
let height = AXIS;
lanes.forEach((lane, i) => {
  if (i && lanes[i - 1].group !== lane.group) height += GAP;
  lane.top = height;
  lane.height = lane.compute ? (lane.measured ? TALL * 0.8 : TALL) : THIN;
  lane.longest = lane.boxes.reduce((most, b) => Math.max(most, data.boxes.end[b] - data.boxes.start[b]), 0);
  height += lane.height + (lane.compute && lanes[i + 1]?.measured ? 2 : 0);
});

function mixed(color, shade) {
  const keep = (2 / 3) ** shade;
  const channels = [1, 3, 5].map((at) => Math.round(255 - (255 - parseInt(color.slice(at, at + 2), 16)) * keep));
  return `rgb(${channels.join(",")})`;
}
const fills = data.kinds.map((kind) => [0, 1, 2, 3, 4].map((shade) => mixed(data.colors[kind], shade)));

// -- drawing ----------------------------------------------------------------------------------------
function prepared(canvas, tall) {
  const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  canvas.style.height = tall + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  return [pen, width];
}
const scaleOf = (width) => (width - GUTTER) / (view.to - view.from);
function firstVisible(lane) {
  const { start } = data.boxes, from = view.from - lane.longest;
  let low = 0, high = lane.boxes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[lane.boxes[middle]] < from) low = middle + 1; else high = middle;
  }
  return low;
}
function ticks() {
  const rough = (view.to - view.from) / 9, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let t = Math.ceil(view.from / step) * step; t <= view.to * (1 + 1e-9); t += step) found.push(+t.toPrecision(12));
  return found;
}
function matches(box) {
  if (view.hidden.has(data.boxes.color[box])) return false;
  if (!view.words.length) return true;
  const text = boxNodes(box).join(" ") + " " + data.labels[data.boxes.label[box]];
  return view.words.every((word) => text.split(/[\s[\],]+/).includes(word) || (word.length > 2 && text.includes(word)));
}
function boxNodes(box) {
  const { op, pass, pp, ep, mb } = data.boxes;
  const first = nodeText(op[box], pass[box], pp[box], ep[box], mb[box]);
  return [first, ...(data.more[box] || []).map((other) => nodeText(other, pass[box], pp[box], ep[box], mb[box]))];
}
function drawTimeline() {
  const [pen, width] = prepared($("timeline").firstElementChild, height + 6);
  const scale = scaleOf(width), x = (time) => GUTTER + (time - view.from) * scale;
  const idle = style("--idle"), thin = style("--thin"), ink = style("--ink"), muted = style("--muted"), line = style("--line");
  for (const lane of lanes) {
    pen.fillStyle = lane.compute ? idle : thin;
    pen.fillRect(GUTTER, lane.top, width - GUTTER, lane.height);
  }
  drawAxis(pen, x, width, height, muted, line);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, width - GUTTER, height);
  pen.clip();
  for (const lane of lanes) drawLane(pen, lane, scale, x, ink);
  drawCursor(pen, x, height, muted);
  pen.restore();
  drawNames(pen, ink, muted);
}
function drawAxis(pen, x, right, bottom, muted, line) {
  pen.font = "11.5px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (const tick of ticks()) {
    pen.fillStyle = line;
    pen.fillRect(Math.round(x(tick)), AXIS - 6, 1, bottom - AXIS + 6);
    pen.fillStyle = muted;
    const text = timeText(tick), half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(x(tick), GUTTER + half), right - half), 14);
  }
}
function drawLane(pen, lane, scale, x, ink) {
  const { start, end, part, parts, color, shade, label, critical, blocked } = data.boxes;
  let lastPixel = -1, lastFill = "";
  for (let i = firstVisible(lane); i < lane.boxes.length; i++) {
    const box = lane.boxes[i];
    if (start[box] > view.to) break;
    if (end[box] < view.from) continue;
    const left = x(start[box]), wide = Math.max((end[box] - start[box]) * scale, 1);
    const tall = lane.height / parts[box], top = lane.top + part[box] * tall;
    const fill = fills[color[box]][Math.min(shade[box], 4)];
    const pixel = Math.floor(left);
    if (wide <= 1 && pixel === lastPixel && fill === lastFill) continue;
    [lastPixel, lastFill] = [pixel, fill];
    pen.globalAlpha = matches(box) ? 1 : 0.13;
    if (blocked[box]) drawBlocked(pen, x(start[box] - blocked[box]), left, top, tall, fill);
    pen.fillStyle = fill;
    const edge = wide > 3 ? 1 : 0;
    pen.fillRect(left, top, wide - edge, tall - (parts[box] > 1 && part[box] + 1 < parts[box] ? 1 : 0));
    if (view.critical && critical[box]) {
      pen.fillStyle = ink;
      pen.fillRect(left, top + tall - 3, wide - edge, 3);
    }
    if (lane.compute && wide > 13) drawLabel(pen, data.labels[label[box]], left, wide, top + tall / 2, tall, color[box], shade[box]);
  }
  pen.globalAlpha = 1;
}
function drawBlocked(pen, from, to, top, tall, fill) {
  pen.save();
  pen.beginPath();
  pen.rect(from, top, to - from, tall);
  pen.clip();
  pen.strokeStyle = fill;
  pen.globalAlpha *= 0.55;
  for (let at = Math.floor(from / 6) * 6 - tall; at < to; at += 6) {
    pen.beginPath();
    pen.moveTo(at, top + tall);
    pen.lineTo(at + tall, top);
    pen.stroke();
  }
  pen.restore();
}
function drawLabel(pen, text, left, wide, middle, tall, color, shade) {
  pen.font = `${Math.min(12, tall * 0.62)}px system-ui, sans-serif`;
  const short = text.replace(/^\d*[A-Z]+/, "");
  const shown = [text, short].find((t) => pen.measureText(t).width < wide - 4);
  if (!shown || tall < 9) return;
  pen.fillStyle = shade > 0 || data.kinds[color] === "BW" ? "#1f2933" : "#ffffff";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(shown, left + wide / 2, middle + 0.5);
}
function drawNames(pen, ink, muted) {
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const lane of lanes) {
    if (!lane.compute) continue;
    const group = data.groups[lane.group], middle = lane.top + lane.height / 2;
    pen.fillStyle = lane.measured ? muted : ink;
    pen.font = lane.measured ? "11px system-ui, sans-serif" : "600 12.5px system-ui, sans-serif";
    const second = TALL >= 30 && !lane.measured && lane.stream === "compute";
    pen.fillText(lane.measured ? "measured" : lane.stream === "compute" ? group.name : lane.stream, GUTTER - 10, middle - (second ? 6 : 0));
    if (!second) continue;
    pen.fillStyle = muted;
    pen.font = "10.5px system-ui, sans-serif";
    pen.fillText((100 * (1 - group.bubble)).toFixed(0) + "% busy", GUTTER - 10, middle + 8);
  }
}
function drawCursor(pen, x, bottom, muted) {
  if (view.cursor === null) return;
  pen.fillStyle = muted;
  pen.fillRect(x(view.cursor), AXIS, 1, bottom - AXIS);
}
function drawMemory() {
  const canvas = $("memory").firstElementChild;
  if (!data.peak) return;
  const tall = data.groups.length * (STRIP + GAP);
  const [pen, width] = prepared(canvas, tall);
  const scale = scaleOf(width), x = (time) => GUTTER + (time - view.from) * scale;
  data.groups.forEach((group, number) => {
    const top = number * (STRIP + GAP), y = (bytes) => top + STRIP - (bytes / data.peak) * (STRIP - 4);
    pen.fillStyle = style("--thin");
    pen.fillRect(GUTTER, top, width - GUTTER, STRIP);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, top, width - GUTTER, STRIP);
    pen.clip();
    drawStack(pen, group.memory, x, y, scale);
    drawPeak(pen, group, x, y, width);
    drawCursor(pen, x, tall, style("--muted"));
    pen.restore();
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = style("--ink");
    pen.font = "600 12.5px system-ui, sans-serif";
    pen.fillText(group.name, GUTTER - 10, top + STRIP / 2 - 7);
    pen.fillStyle = style("--muted");
    pen.font = "10.5px system-ui, sans-serif";
    pen.fillText(bytesText(group.peak), GUTTER - 10, top + STRIP / 2 + 8);
  });
}
function drawStack(pen, memory, x, y, scale) {
  let low = 0, high = memory.time.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (memory.time[middle] <= view.from) low = middle; else high = middle - 1;
  }
  let pixel = -1;
  for (let i = low; i < memory.time.length && memory.time[i] <= view.to; i++) {
    const left = Math.round(x(Math.max(memory.time[i], view.from))), right = Math.round(x(memory.time[i + 1] ?? data.end));
    if (right === left && left === pixel) continue;
    pixel = left;
    let below = 0;
    data.memoryKinds.forEach((kind, k) => {
      const bytes = memory.bytes[k][i];
      pen.fillStyle = data.memoryColors[kind];
      if (bytes) pen.fillRect(left, y(below + bytes), Math.max(right - left, 1), y(below) - y(below + bytes));
      below += bytes;
    });
  }
}
function drawPeak(pen, group, x, y, width) {
  const at = x(group.peakTime), level = y(group.peak);
  if (at < GUTTER - 4 || at > width) return;
  pen.fillStyle = style("--ink");
  pen.beginPath();
  pen.arc(at, level, 3, 0, 7);
  pen.fill();
}
let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawTimeline(); drawMemory(); });
}

// -- looking around -----------------------------------------------------------------------------------
function setView(from, to) {
  const span = Math.min(Math.max(to - from, data.end * 1e-6), data.end);
  view.from = Math.min(Math.max(from, 0), data.end - span);
  view.to = view.from + span;
  redraw();
}
function zoom(factor, at) {
  const span = (view.to - view.from) * factor, share = (at - view.from) / (view.to - view.from);
  setView(at - span * share, at + span * (1 - share));
}
function timeAt(event) {
  const box = event.currentTarget.getBoundingClientRect();
  return view.from + (event.clientX - box.left - GUTTER) / scaleOf(box.width);
}
function boxAt(event) {
  const y = event.clientY - event.currentTarget.getBoundingClientRect().top, time = timeAt(event);
  const lane = lanes.find((l) => y >= l.top && y < l.top + l.height);
  if (!lane || time < view.from) return -1;
  const slack = 3 / scaleOf(event.currentTarget.clientWidth), { start, end, part, parts, blocked } = data.boxes;
  let nearest = -1;
  for (let i = firstVisible(lane); i < lane.boxes.length; i++) {
    const box = lane.boxes[i], stripe = Math.floor(((y - lane.top) / lane.height) * parts[box]);
    if (start[box] - blocked[box] > time + slack) break;
    if (end[box] >= time && start[box] - blocked[box] <= time && stripe === part[box]) return box;
    if (Math.abs(start[box] - time) < slack) nearest = box;
  }
  return nearest;
}
function showTip(event, html) {
  const tip = $("tip");
  tip.hidden = !html;
  if (!html) return;
  tip.innerHTML = html;
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 8)) + "px";
  tip.style.top = (event.clientY + tall + 24 > innerHeight ? event.clientY - tall - 12 : event.clientY + 16) + "px";
}
function boxTip(box) {
  const { start, end, blocked, bytes, op, label, lane } = data.boxes;
  const row = (name, value) => `<tr><td>${name}</td><td>${value}</td></tr>`;
  const source = data.sources[data.ops[op[box]]];
  const nodes = boxNodes(box).map(escape).join("<br>");
  return `<b>${escape(data.labels[label[box]])}</b> on ${escape(data.groups[lanes[lane[box]].group].name)}<br>${nodes}` +
    (source ? `<br><code>${escape(source)}</code>` : "") +
    `<table>${row("starts", timeText(start[box]))}${row("takes", timeText(end[box] - start[box]))}` +
    (blocked[box] ? row("waited", timeText(blocked[box])) : "") +
    (bytes[box] ? row(lanes[lane[box]].compute ? "keeps" : "moves", bytesText(bytes[box]) + " per device") : "") +
    "</table>";
}
function memoryTip(event) {
  const y = event.clientY - event.currentTarget.getBoundingClientRect().top;
  const group = data.groups[Math.floor(y / (STRIP + GAP))], time = timeAt(event);
  if (!group || time < view.from) return "";
  let i = 0;
  const { time: times, bytes } = group.memory;
  while (i + 1 < times.length && times[i + 1] <= time) i++;
  const rows = data.memoryKinds.map((kind, k) => [kind, bytes[k][i]]).filter(([, n]) => n).reverse();
  const total = rows.reduce((sum, [, n]) => sum + n, 0);
  return `<b>${bytesText(total)}</b> on each device of ${escape(group.name)} at ${timeText(time)}<table>` +
    rows.map(([kind, n]) => `<tr><td>${kind}</td><td>${bytesText(n)}</td></tr>`).join("") +
    `</table>peak ${bytesText(group.peak)} at ${timeText(group.peakTime)}`;
}
function listen(canvas, tipOf) {
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = ((event.deltaX || event.deltaY) / canvas.clientWidth) * (view.to - view.from);
      setView(view.from + by, view.to + by);
    } else zoom(Math.exp(event.deltaY * 0.0015), timeAt(event));
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("moving"); });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = (drag.x - event.clientX) / scaleOf(canvas.clientWidth);
      canvas.classList.add("moving");
      setView(drag.from + by, drag.to + by);
    }
    view.cursor = timeAt(event);
    showTip(event, drag ? "" : tipOf(event));
    redraw();
  });
  canvas.addEventListener("pointerleave", (event) => { view.cursor = null; showTip(event, ""); redraw(); });
  canvas.addEventListener("dblclick", () => setView(0, data.end));
}
listen($("timeline").firstElementChild, (event) => { const box = boxAt(event); return box < 0 ? "" : boxTip(box); });
listen($("memory").firstElementChild, memoryTip);
const centre = () => (view.from + view.to) / 2;
$("in").onclick = () => zoom(0.5, centre());
$("out").onclick = () => zoom(2, centre());
$("reset").onclick = () => setView(0, data.end);
$("critical").onchange = (event) => { view.critical = event.target.checked; redraw(); };
$("search").oninput = (event) => { view.words = event.target.value.split(/\s+/).filter(Boolean); redraw(); };
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT") return;
  const by = (view.to - view.from) * 0.15;
  if (event.key === "+" || event.key === "=") zoom(0.7, centre());
  else if (event.key === "-") zoom(1.4, centre());
  else if (event.key === "ArrowLeft") setView(view.from - by, view.to - by);
  else if (event.key === "ArrowRight") setView(view.from + by, view.to + by);
});
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// -- heading and legends ------------------------------------------------------------------------------
$("title").textContent = data.title;
$("subtitle").textContent = data.subtitle;
$("facts").innerHTML = data.facts.map(([name, value, measured]) =>
  `<div class="fact"><b>${escape(value)}${measured ? ` <em>${escape(measured)}</em>` : ""}</b><span>${escape(name)}</span></div>`).join("");
const legendOrder = Object.keys(data.colors).filter((kind) => data.kinds.includes(kind));
legendOrder.forEach((kind) => {
  const number = data.kinds.indexOf(kind);
  const key = document.createElement("button");
  key.className = "key";
  key.innerHTML = `<i style="background:${data.colors[kind]}"></i>${escape(kind)}`;
  key.onclick = () => {
    if (!view.hidden.delete(number)) view.hidden.add(number);
    key.classList.toggle("off", view.hidden.has(number));
    redraw();
  };
  $("legend").append(key);
});
$("memory-legend").innerHTML = data.memoryKinds.map((kind) =>
  `<span class="key"><i style="background:${data.memoryColors[kind]}"></i>${kind}</span>`).join("");
$("memory-title").hidden = $("memory").hidden = !data.peak;
redraw();
