// Memory of one device of each group over time, below the timeline and with its times.
for (const { memory } of groups) {
  memory.bytes = memory.bytes.map(whole);
  memory.total = Float64Array.from(memory.time, (_, i) => memory.bytes.reduce((sum, column) => sum + column[i], 0));
}
const STRIP = groups.length > 16 ? 40 : 64;
function drawMemory() {
  if (!data.peak) return;
  const canvas = $("memory").firstElementChild, tall = groups.length * (STRIP + GAP), [pen, width] = prepared(canvas, tall);
  const scale = scaleOf(width), x = (time) => GUTTER + (time - view.from) * scale;
  groups.forEach((group, number) => {
    const top = number * (STRIP + GAP);
    if (!isOnScreen(canvas, top, top + STRIP)) return;
    const y = (bytes) => top + STRIP - (bytes / data.peak) * (STRIP - 6);
    pen.fillStyle = style("--thin");
    pen.fillRect(GUTTER, top, width - GUTTER, STRIP);
    clip(pen, GUTTER, top, width - GUTTER, STRIP);
    drawStack(pen, group.memory, x, y);
    drawPeak(pen, x(group.peakTime), y(group.peak));
    drawCursor(pen, x, tall);
    pen.restore();
    write(pen, group.name, GUTTER - 10, top + STRIP / 2 - 7, "600 12.5px", style("--ink"), "right");
    write(pen, bytesText(group.peak), GUTTER - 10, top + STRIP / 2 + 8, "10.5px", style("--muted"), "right");
  });
}
/** Of several steps within a pixel the largest is drawn, so that no peak is lost. */
function drawStack(pen, memory, x, y) {
  const { time, bytes, total } = memory;
  let first = 0, high = time.length - 1;
  while (first < high) {
    const middle = (first + high + 1) >> 1;
    if (time[middle] <= view.from) first = middle; else high = middle - 1;
  }
  for (let i = first; i < time.length && time[i] <= view.to; i++) {
    const left = Math.round(x(Math.max(time[i], view.from)));
    let most = i;
    while (i + 1 < time.length && Math.round(x(time[i + 1])) <= left) if (total[++i] > total[most]) most = i;
    const right = Math.round(x(Math.min(time[i + 1] ?? data.end, view.to)));
    let below = 0;
    data.memoryKinds.forEach((kind, k) => {
      const amount = bytes[k][most];
      pen.fillStyle = data.memoryColors[kind];
      if (amount) pen.fillRect(left, y(below + amount), Math.max(right - left, 1), y(below) - y(below + amount));
      below += amount;
    });
  }
}
function drawPeak(pen, x, y) {
  [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [style("--ink"), style("--page"), 1.5];
  pen.beginPath();
  pen.arc(x, y, 3.5, 0, 7);
  pen.fill();
  pen.stroke();
}
function memoryTip(place) {
  const group = groups[Math.floor(place.y / (STRIP + GAP))], at = timeAt(place);
  if (!group || at < view.from) return "";
  const { time, bytes } = group.memory;
  let i = 0;
  while (i + 1 < time.length && time[i + 1] <= at) i++;
  const rows = data.memoryKinds.map((kind, k) => [kind, bytes[k][i]]).filter(([, amount]) => amount).reverse();
  return `<b>${bytesText(rows.reduce((sum, [, amount]) => sum + amount, 0))}</b> on each device of ${escape(group.name)} at ${timeText(at)}` +
    `<table>${rows.map(([kind, amount]) => row(kind, bytesText(amount))).join("")}</table>peak ${bytesText(group.peak)} at ${timeText(group.peakTime)}`;
}
data.memoryKinds.forEach((kind) => explain(kind, data.memoryColors[kind], "", $("memory-legend")));
if (!data.peak) for (const id of ["memory-title", "memory"]) $(id).hidden = true;
listen($("timeline").firstElementChild);
listen($("memory").firstElementChild);
window.page = { view, lanes, gutter: GUTTER, zoom };
redraw();
