"use strict";
// What the timeline and the graph share: the data, words, colours, the canvas, looking around, the legend.
// The script of the view follows in the same module. It defines draw, zoom, pan, reset, frame, rematch and tipAt.
const $ = (id) => document.getElementById(id);
async function loaded() {
  const { type, textContent } = $("data");
  if (type === "application/json") return JSON.parse(textContent);
  const bytes = Uint8Array.from(atob(textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}
const data = await loaded();
const chosen = { words: [], hidden: new Set() };
const FONT = "system-ui, sans-serif";

// -- words ------------------------------------------------------------------------------------------
function timeText(time, like = time) {
  if (data.unit !== "s") return String(+time.toPrecision(8));
  for (const [scale, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
    if (Math.abs(like) >= scale) return +(time / scale).toPrecision(4) + " " + name;
  return like ? +(time / 1e-9).toPrecision(4) + " ns" : "0 s";
}
function bytesText(bytes) {
  for (const [power, name] of [[3, "GiB"], [2, "MiB"], [1, "KiB"]])
    if (bytes >= 1024 ** power) return (bytes / 1024 ** power).toFixed(2) + " " + name;
  return bytes + " B";
}
const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const row = (name, value) => `<tr><td>${name}</td><td>${value}</td></tr>`;
/** Whether `text`, a node with its coordinates, has every word that is searched for; coordinates as a whole, other words in part. */
function matches(text) {
  const parts = text.split(/[\s[\],]+/);
  return chosen.words.every((word) => parts.includes(word) || (word.length > 2 && !word.includes("=") && text.includes(word)));
}

// -- colours ----------------------------------------------------------------------------------------
let styles = {};
const style = (name) => (styles[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
function shaded(color, shade) {
  const keep = (2 / 3) ** Math.min(shade, data.ordinals.length - 1);
  return "#" + channels(color).map((c) => Math.round(255 - (255 - c) * keep).toString(16).padStart(2, "0")).join("");
}
function inkOn(color) {
  const [r, g, b] = channels(color).map((c) => (c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.2 ? "#ffffff" : "#1f2933";
}

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
/** Whether the part of a canvas between two heights is on the screen. */
function isOnScreen(canvas, top, bottom) {
  const { top: start } = canvas.getBoundingClientRect();
  return start + bottom > 0 && start + top < innerHeight;
}
function clip(pen, left, top, wide, tall) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, wide, tall);
  pen.clip();
}
function write(pen, text, x, y, font, color, align = "center") {
  [pen.font, pen.fillStyle, pen.textAlign, pen.textBaseline] = [`${font} ${FONT}`, color, align, "middle"];
  pen.fillText(text, x, y);
}
/** As much of a task as has room: "2F10", "2F" over "10", the microbatch alone, or nothing; see labels.py. */
function writeTask(pen, text, x, y, wide, tall, ink) {
  const one = Math.min(12, tall * 0.66), two = Math.min(11, tall * 0.43), [, task, microbatch] = text.match(/^(\d*[A-Z]+)(\d+)$/) ?? [];
  const fits = (words, size) => { pen.font = `${size}px ${FONT}`; return size >= 7 && pen.measureText(words).width <= wide; };
  if (fits(text, one)) write(pen, text, x, y + 0.5, one + "px", ink);
  else if (task && fits(task, two) && fits(microbatch, two)) {
    write(pen, task, x, y - two * 0.55, two + "px", ink);
    write(pen, microbatch, x, y + two * 0.6, two + "px", ink);
  } else if (task && fits(microbatch, one)) write(pen, microbatch, x, y + 0.5, one + "px", ink);
}
let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

// -- looking around ---------------------------------------------------------------------------------
function showTip(event, html) {
  const tip = $("tip");
  tip.hidden = !html;
  if (!html) return;
  tip.innerHTML = html;
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 8)) + "px";
  tip.style.top = Math.max(4, event.clientY + tall + 24 > innerHeight ? event.clientY - tall - 12 : event.clientY + 16) + "px";
}
function placeOf(event) {
  const box = event.currentTarget.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width };
}
function listen(canvas) {
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(-(event.deltaX || event.deltaY), 0);
    else zoom(Math.exp(-event.deltaY * 0.0015), placeOf(event));
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { drag = placeOf(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("moving"); });
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOf(event), tip = tipAt(canvas, place);
    if (drag) {
      canvas.classList.add("moving");
      pan(place.x - drag.x, place.y - drag.y);
      drag = place;
    }
    showTip(event, drag ? "" : tip);
    redraw();
  });
  canvas.addEventListener("pointerleave", (event) => { tipAt(canvas, null); showTip(event, ""); redraw(); });
  canvas.addEventListener("dblclick", () => reset());
}
$("in").onclick = () => zoom(2);
$("out").onclick = () => zoom(0.5);
$("reset").onclick = () => reset();
$("search").oninput = (event) => {
  chosen.words = event.target.value.split(/\s+/).filter(Boolean);
  const count = rematch();
  $("found").textContent = chosen.words.length ? `${count} found` : "";
  redraw();
};
document.addEventListener("keydown", (event) => {
  if (event.target.id === "search" && event.key === "Enter") frame();
  if (event.target.tagName === "INPUT") return;
  const step = { "+": [zoom, 1.4], "=": [zoom, 1.4], "-": [zoom, 0.7], ArrowLeft: [pan, 120, 0], ArrowRight: [pan, -120, 0] };
  const [act, ...amounts] = step[event.key] ?? [];
  if (act) act(...amounts);
});
window.addEventListener("resize", redraw);
window.addEventListener("scroll", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { styles = {}; redraw(); });

// -- heading and legend -----------------------------------------------------------------------------
$("title").textContent = data.title;
$("subtitle").textContent = data.subtitle;
$("facts").innerHTML = data.facts.map(([name, value, beside]) =>
  `<div class="fact"><b>${escape(value)}${beside ? ` <em>${escape(beside)}</em>` : ""}</b><span>${escape(name)}</span></div>`).join("");
function explain(words, color, mark = "", parent = $("legend")) {
  const key = document.createElement("span");
  key.className = "key";
  key.innerHTML = `<i class="${mark}" style="${mark === "edge" ? "border-color" : "background"}:${color}"></i>${escape(words)}`;
  parent.append(key);
  return key;
}
Object.keys(data.colors).filter((kind) => data.kinds.includes(kind)).forEach((kind) => {
  const number = data.kinds.indexOf(kind), key = document.createElement("button");
  key.className = "key";
  key.title = "hide or show";
  key.innerHTML = `<i style="background:${data.colors[kind]}"></i>${escape(data.meanings[kind] ?? kind)}`;
  key.onclick = () => {
    if (!chosen.hidden.delete(number)) chosen.hidden.add(number);
    key.classList.toggle("off", chosen.hidden.has(number));
    rematch();
    redraw();
  };
  $("legend").append(key);
});
