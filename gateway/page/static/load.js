// The view Load: what the gateway's metrics and its list of models tell, every two seconds while it is looked at.
import { call, explain, failure } from "./api.js";
import { by, h, svg } from "./dom.js";
import { t } from "./words.js";

const EVERY_MS = 2000;
const KEPT_MS = 5 * 60_000;
const GRID = { width: 240, height: 56 };
const TILES = ["running", "waiting", "speed", "memory"];

let samples = []; // {at, running, waiting, speed, memory, generated}
let latest = null; // {models, metrics}
let timer = null;
let refused = null; // why the last load or unload was not done
const busy = new Map(); // model -> "loading" | "unloading"

/** Begin or end to look. */
export function watch(on) {
  clearTimeout(timer);
  timer = null;
  if (on) look();
}

async function look() {
  const mine = (timer = setTimeout(() => {}, 0));
  try {
    const [metrics, models] = await Promise.all([call("metrics").then((r) => r.text()), call("v1/models").then((r) => r.json())]);
    latest = { metrics: read(metrics), models: models.data };
    sample(latest.metrics);
    show();
  } catch (error) {
    show(failure(error));
  }
  if (timer === mine) timer = setTimeout(look, EVERY_MS);
}

/** Read Prometheus' text: a list of {name, labels, value}. */
function read(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const parts = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!parts || !parts[1].startsWith("tritongate_")) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    found.push({ name: parts[1].slice(11), labels, value: Number(parts[3]) });
  }
  return found;
}

const sum = (metrics, name, model) =>
  metrics.filter((each) => each.name === name && (model === undefined || each.labels.model === model))
    .reduce((total, each) => total + each.value, 0);

/** One row for each model on each Triton. Each process of the gateway tells of the same ones: the worst counts. */
function tritons(metrics) {
  const rows = new Map();
  for (const { name, labels: { model, upstream }, value } of metrics) {
    const field = { upstream_healthy: "healthy", upstream_requests_waiting: "waiting", upstream_kv_usage_ratio: "memory" }[name];
    if (!field) continue;
    const key = JSON.stringify([upstream, model]);
    const row = rows.get(key) ?? { model, upstream };
    rows.set(key, row);
    if (field === "healthy") row.healthy = Math.min(row.healthy ?? 1, value);
    else row[field] = Math.max(row[field] ?? 0, value);
  }
  return [...rows.values()].sort((a, b) => a.upstream.localeCompare(b.upstream) || a.model.localeCompare(b.model));
}

function sample(metrics) {
  const at = performance.now();
  const generated = sum(metrics, "generated_tokens_total");
  const before = samples.at(-1);
  const rows = tritons(metrics);
  const memory = rows.map((row) => row.memory).filter((value) => value !== undefined);
  samples.push({
    at,
    generated,
    running: sum(metrics, "requests_in_flight"),
    waiting: sum(metrics, "requests_waiting") + rows.reduce((total, row) => total + (row.waiting ?? 0), 0),
    speed: before && generated >= before.generated ? ((generated - before.generated) * 1000) / (at - before.at) : 0,
    memory: memory.length ? Math.max(...memory) : null,
  });
  samples = samples.filter((each) => each.at > at - KEPT_MS);
}

const shown = (name, value) => {
  if (value === null || value === undefined) return "–";
  if (name === "memory") return `${value > 0 && value < 0.1 ? (value * 100).toFixed(1) : Math.round(value * 100)} %`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString() : value.toFixed(1);
};

function chart(name) {
  const now = performance.now();
  const points = samples.filter((each) => each[name] !== null);
  const most = Math.max(0, ...points.map((each) => each[name]));
  const top = name === "memory" ? 1 : Math.max(1, most) * 1.1;
  const place = (each) => [
    (GRID.width * (1 - (now - each.at) / KEPT_MS)).toFixed(1),
    (GRID.height - 1.5 - (each[name] / top) * (GRID.height - 3)).toFixed(1),
  ];
  const line = points.map((each) => place(each).join(" ")).join("L");
  const label = t("chart", { name: t(name), now: shown(name, points.at(-1)?.[name]), most: shown(name, points.length ? most : null) });
  const image = svg("svg", { viewBox: `0 0 ${GRID.width} ${GRID.height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  image.append(svg("path", { class: "ground", d: `M0 ${GRID.height - 1}H${GRID.width}` }));
  if (points.length > 1) {
    const [first, last] = [place(points[0])[0], place(points.at(-1))[0]];
    image.append(svg("path", { class: "area", d: `M${line}L${last} ${GRID.height}L${first} ${GRID.height}Z` }));
    image.append(svg("path", { class: "line", d: `M${line}` }));
  }
  return image;
}

/** Show what was seen last, and what failed since. */
export function show(failed = refused) {
  const error = by("load-error");
  error.hidden = failed === null;
  if (failed) {
    const { text, detail } = explain(failed);
    error.textContent = detail ? `${text} ${detail}` : text;
  }
  by("tiles").replaceChildren(...TILES.map((name) => h("section", { class: "tile" },
    h("h2", {}, t(name)), h("p", { class: "figure" }, shown(name, samples.at(-1)?.[name])), chart(name),
    h("p", { class: "axis" }, h("span", {}, t("ago", { n: KEPT_MS / 60_000 })), h("span", {}, t("now"))))));
  if (!latest) return;
  const state = (good, word) => h("td", {}, h("span", { class: good ? "dot good" : "dot" }), word);
  // A button that has the focus is not taken away from under the keyboard: rows are made anew only if they changed.
  fill(by("models"), latest.models.map((model) => [model, busy.get(model.id), sum(latest.metrics, "requests_in_flight", model.id)]),
    ([model, work, running]) => h("tr", {},
      h("th", { scope: "row" }, model.id),
      state(model.ready, work ? t(work) : t(model.ready ? "ready" : model.unloaded ? "notLoaded" : "notReady")),
      h("td", { class: "right" }, shown("running", running)),
      h("td", { class: "right" }, model.max_model_len ? model.max_model_len.toLocaleString() : "–"),
      h("td", { class: "right" }, h("button", { type: "button", class: "plain", disabled: Boolean(work), onclick: () => change(model),
        "aria-label": `${t(model.ready ? "unloadModel" : "loadModel")} ${model.id}` }, t(model.ready ? "unloadModel" : "loadModel")))));
  fill(by("tritons"), tritons(latest.metrics), (row) => h("tr", {},
    h("th", { scope: "row" }, row.upstream), h("td", {}, row.model),
    state(row.healthy === 1, t(row.healthy === 1 ? "healthy" : "unhealthy")),
    h("td", { class: "right" }, shown("waiting", row.waiting)), h("td", { class: "right" }, shown("memory", row.memory))));
}

function fill(body, rows, make) {
  const made = JSON.stringify([document.documentElement.lang, rows]);
  if (body.made === made) return;
  body.made = made;
  body.replaceChildren(...rows.map(make));
}

async function change(model) {
  if (model.ready && !confirm(t("sure", { name: model.id }))) return;
  busy.set(model.id, model.ready ? "unloading" : "loading");
  refused = null;
  show();
  try {
    const path = model.id.split("/").map(encodeURIComponent).join("/");
    await call(`v1/models/${path}/${model.ready ? "unload" : "load"}`, { method: "POST" });
  } catch (error) {
    refused = failure(error);
  }
  busy.delete(model.id);
  show();
  if (timer !== null) watch(true);
}
