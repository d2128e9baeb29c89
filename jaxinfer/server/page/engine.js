// What the engine is doing: the snapshots of /live, drawn.

import { ApiError, events, request } from "./stream.js";

const byId = (id) => document.getElementById(id);
const HISTORY_MS = 120_000;
const GAP_MS = 3_000; // no line is drawn over a longer time without snapshots
const FIRST_COLOUR = 3;
const history = []; // [when, tokens per second]
let newest = null;

// ------------------------------------------------------------------------------------- words

const put = (id, text) => {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
};
const number = (value) => value.toLocaleString("en");
const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`);
function bytes(value) {
  if (value === null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}
function time(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  return `${seconds.toFixed(2)} s`;
}
const tokens = (count) => `${number(count)} ${count === 1 ? "token" : "tokens"}`;
const rate = (value) => `${value < 100 ? value.toFixed(1) : number(Math.round(value))} tok/s`;

// ----------------------------------------------------------------------------------- drawing

function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return names.map((name) => style.getPropertyValue(`--${name}`).trim());
}
const palette = () => colours("free", "cached", "shared", ...Array.from({ length: 12 }, (_, i) => `c${i}`));

// The canvas, cleared, in CSS pixels at the screen's own resolution.
function surface(id) {
  const canvas = byId(id);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { canvas, context, width, height };
}

function drawMap(pages) {
  const { canvas, context, width, height } = surface("map");
  const fills = palette();
  const cells = pages.runs.reduce((sum, run) => sum + run[2], 0);
  let size = Math.min(18, Math.max(2, Math.floor(Math.sqrt((width * height) / cells))));
  while (size > 2 && Math.ceil(cells / Math.floor(width / size)) * size > height) size -= 1;
  const columns = Math.floor(width / size);
  const gap = size > 4 ? 1 : 0;
  let cell = 0;
  for (const [code, tenths, length] of pages.runs) {
    for (let i = 0; i < length; i += 1, cell += 1) {
      const x = (cell % columns) * size, y = Math.floor(cell / columns) * size;
      context.fillStyle = fills[0];
      context.fillRect(x, y, size - gap, size - gap);
      if (tenths === 0) continue;
      context.globalAlpha = 0.3 + 0.07 * tenths;
      context.fillStyle = fills[code];
      context.fillRect(x, y, size - gap, size - gap);
      context.globalAlpha = 1;
    }
  }
  const text = `${number(pages.live)} in use, ${number(pages.shared)} shared, ${number(pages.cached)} cached, ${number(pages.free)} free`;
  put("pages-text", `${text} of ${number(pages.total)}`);
  canvas.setAttribute("aria-label", `Page map: ${text}`);
  put("per-cell", pages.per_cell > 1 ? `a square is ${pages.per_cell} pages` : `a square is a page of ${pages.page_size} tokens`);
}

function drawSteps(steps) {
  const { canvas, context, width, height } = surface("steps");
  const [decode, chunk, padding, timed, line, quiet] = colours("decode", "chunk", "padding", "time", "line", "quiet");
  const band = height * 0.62, foot = height - 2;
  context.fillStyle = line;
  context.fillRect(0, band, width, 1);
  context.fillRect(0, foot + 1, width, 1);
  if (steps.length === 0) return;
  const most = Math.max(...steps.map((s) => s[1] + s[3] + s[4]), 1);
  const slowest = Math.max(...steps.map((s) => s[5]), 1e-6);
  const size = width / 96;
  steps.forEach(([, rows, , tokens, pad, seconds], index) => {
    const x = width - (steps.length - index) * size;
    let y = band;
    for (const [count, fill] of [[rows, decode], [tokens, chunk], [pad, padding]]) {
      const tall = (count / most) * (band - 14);
      context.fillStyle = fill;
      context.fillRect(x, y - tall, Math.max(1, size - 1), tall);
      y -= tall;
    }
    const tall = (seconds / slowest) * (foot - band - 16);
    context.fillStyle = timed;
    context.fillRect(x, foot - tall, Math.max(1, size - 1), tall);
  });
  context.fillStyle = quiet;
  context.font = "11px system-ui, sans-serif";
  context.fillText(tokens(most), 0, 10);
  context.fillText(time(slowest), 0, band + 12);
  const last = steps.at(-1);
  const text = `step ${number(last[0])}: ${last[1]} decode + ${last[3]} prompt + ${last[4]} padding, ${time(last[5])}`;
  put("steps-text", text);
  canvas.setAttribute("aria-label", `Recent steps. Newest ${text}`);
}

function drawHistory() {
  const { canvas, context, width, height } = surface("history");
  const [line, stroke, quiet] = colours("line", "decode", "quiet");
  context.fillStyle = line;
  context.fillRect(0, height - 1, width, 1);
  const now = performance.now();
  const most = Math.max(...history.map((point) => point[1]), 1);
  context.strokeStyle = stroke;
  context.lineWidth = 1.5;
  context.beginPath();
  history.forEach(([when, value], index) => {
    const x = width * (1 - (now - when) / HISTORY_MS), y = height - 2 - (value / most) * (height - 18);
    if (index === 0 || when - history[index - 1][0] > GAP_MS) context.moveTo(x, y);
    else context.lineTo(x, y);
  });
  context.stroke();
  context.fillStyle = quiet;
  context.font = "11px system-ui, sans-serif";
  context.fillText(rate(most), 0, 10);
  canvas.setAttribute("aria-label", `Generated tokens per second over 2 minutes: now ${rate(history.at(-1)?.[1] ?? 0)}, at most ${rate(most)}`);
}

function fillLatency(id, spread) {
  const texts = [time(spread.p50), time(spread.p95), time(spread.p99), number(spread.count)];
  byId(id).querySelectorAll("td").forEach((cell, index) => (cell.textContent = texts[index]));
}

function fillRequests(snapshot) {
  const fills = palette();
  byId("rows").replaceChildren(
    ...snapshot.requests.map((one) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = fills[one.code];
      head.append(swatch, one.sequences > 1 ? `${one.id} ×${one.sequences}` : one.id);
      row.append(head);
      for (const value of [one.prompt_tokens, one.cached_tokens, one.output_tokens, one.pages]) {
        row.insertCell().textContent = number(value);
      }
      return row;
    }),
  );
  put("more", snapshot.more_requests ? `and ${snapshot.more_requests} more` : snapshot.requests.length ? "" : "none");
}

function draw() {
  if (newest === null) return;
  drawMap(newest.pages);
  drawSteps(newest.steps);
  drawHistory();
  fillRequests(newest);
}

function remember(perSecond) {
  const now = performance.now();
  history.push([now, perSecond]);
  while (history[0][0] < now - HISTORY_MS) history.shift();
}

// A step takes so long that nothing is told: nothing is generated, either.
function pulse(state) {
  remember(0);
  put("rate", rate(0));
  put("computed", rate(0));
  health(state);
  drawHistory();
}

function show(snapshot) {
  newest = snapshot;
  remember(snapshot.generated_per_s);
  put("rate", rate(snapshot.generated_per_s));
  put("computed", rate(snapshot.computed_per_s));
  put("running", number(snapshot.running));
  put("waiting", number(snapshot.waiting));
  const prefix = snapshot.prefix;
  put("prefix", prefix === null ? "off" : prefix.queries ? share(prefix.hits / prefix.queries) : "–");
  put("preemptions", number(snapshot.preemptions));
  put("kv", bytes(snapshot.memory.kv_bytes));
  put("parameters", bytes(snapshot.memory.param_bytes));
  put("rss", bytes(snapshot.memory.rss_bytes));
  put("mbu", share(snapshot.roofline.mbu));
  put("mfu", share(snapshot.roofline.mfu));
  put("finished", number(Object.values(snapshot.finished).reduce((sum, count) => sum + count, 0)));
  fillLatency("first-token", snapshot.latency.first_token);
  fillLatency("inter-token", snapshot.latency.inter_token);
  health(snapshot.health);
  draw();
}

function health(state) {
  const slow = state.step_s !== null && state.step_s > 1 ? `, this step for ${state.step_s.toFixed(0)} s` : "";
  put("step-health", `${state.status === "ok" ? "" : `${state.status}, `}${state.sequences} of ${state.capacity} places taken${slow}`);
}

// -------------------------------------------------------------------------------- connection

function connection(kind, text) {
  byId("connection").className = kind;
  put("connection-text", text);
}

let watching = null;
let retry = 0;

async function watch() {
  clearTimeout(retry);
  watching?.abort();
  const mine = (watching = new AbortController());
  let wait = 2;
  try {
    const response = await request("live", { signal: mine.signal });
    for await (const { event, data } of events(response)) {
      if (event === "hello") {
        put("model", data.model);
        document.title = `${data.model} · jaxinfer`;
        connection("live", "live");
        document.dispatchEvent(new CustomEvent("hello", { detail: data }));
      } else if (event === "snapshot") show(data);
      else if (event === "pulse") pulse(data.health);
    }
    if (!mine.signal.aborted) connection("lost", "the server ended the stream");
  } catch (error) {
    if (mine.signal.aborted) return;
    if (error instanceof ApiError && error.status === 401) return connection("lost", "wants an API key");
    wait = error.retryAfter || wait;
    connection("lost", error instanceof ApiError ? error.message : "no connection");
  }
  if (!mine.signal.aborted) retry = setTimeout(watch, wait * 1000);
}

// Nobody looks at a hidden page: it watches again when it is seen.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return watch();
  clearTimeout(retry);
  watching?.abort();
  connection("", "paused");
});
document.addEventListener("key", watch);
new ResizeObserver(draw).observe(byId("engine"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
watch();
