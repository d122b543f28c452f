// The page of a job: takes what the lighthouse sends and draws it. All text of members goes in as text, never as markup.
"use strict";

const MOST_ROWS = 200; // drawn at once; the search finds the others
const MOST_EVENTS = 300;
const MOST_POINTS = 4000;
const ORDER = ["dead", "stalled", "suspect", "waiting", "joining", "healing", "training"];

const at = (id) => document.getElementById(id);
const state = { head: null, rows: new Map(), events: [], points: [], lastEvent: 0 };

function element(name, text, className) {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (className) e.className = className;
  return e;
}

function ago(ms) {
  const s = Math.max(0, Math.round((Date.now() - ms) / 1000));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

const clock = (ms) => new Date(ms).toLocaleTimeString();

// What the lighthouse sends

function takeWhole(data) {
  state.rows = new Map(data.rows.map((row) => [row.id, row]));
  state.points = data.points;
  if (data.last < state.lastEvent) { // another lighthouse, which counts anew
    Object.assign(state, { events: [], lastEvent: 0 });
    drawnEvent = 0;
    at("events").replaceChildren();
  }
  for (const event of data.events) keepEvent(event);
  state.head = data.head;
  draw(true);
}

function takeChange(data) {
  for (const row of data.rows) state.rows.set(row.id, row);
  for (const id of data.gone || []) state.rows.delete(id);
  state.head = data.head;
  if (data.head.quorum_id) {
    state.points.push({ at: Date.now(), step: data.head.step, groups: data.head.groups });
    if (state.points.length > MOST_POINTS) state.points = state.points.filter((_, i) => i % 2 === 0);
  }
  draw(data.rows.length > 0 || Boolean(data.gone));
}

function keepEvent(event) {
  if (event.id <= state.lastEvent) return;
  state.lastEvent = event.id;
  state.events.push(event);
  if (state.events.length > MOST_EVENTS) state.events.shift();
}

// Drawing, at most once a frame

let drawing = null;
let rowsToo = false;

function draw(rows) {
  rowsToo = rowsToo || rows;
  drawing ??= requestAnimationFrame(() => {
    drawing = null;
    drawSummary();
    drawChart();
    if (rowsToo) drawRows();
    rowsToo = false;
    drawEvents();
  });
}

function drawSummary() {
  const head = state.head;
  if (!head) return;
  const rates = speeds(10);
  at("step").textContent = head.quorum_id ? head.step : "";
  at("groups").textContent = head.groups;
  at("rate").textContent = rates.length ? (rates.reduce((sum, r) => sum + r.steps, 0) / rates.length).toFixed(1) : "";
  const changed = state.events.filter((event) => event.kind === "quorum").pop();
  at("quorum").textContent = changed ? ago(Date.parse(changed.time)) : head.quorum_id ? "long" : "no quorum yet";
  at("quorum").title = `quorum_id ${head.quorum_id}`;
  const counts = `${head.healthy} alive, ${head.waiting} waiting, at least ${head.min_replicas} needed.`;
  at("reason").textContent = head.waiting ? `Next quorum: ${head.reason}. ${counts}` : counts;
  at("reason").className = head.waiting ? "stuck" : "";
}

// Between two points each: when, steps per second, and that times the groups.
function speeds(last) {
  const points = last ? state.points.slice(-last - 1) : state.points;
  const found = [];
  for (let i = 1; i < points.length; i++) {
    const seconds = (points[i].at - points[i - 1].at) / 1000;
    if (seconds <= 0) continue;
    const steps = Math.max(0, points[i].step - points[i - 1].step) / seconds;
    found.push({ from: points[i - 1].at, until: points[i].at, steps, all: steps * points[i].groups });
  }
  return found;
}

function svg(name, attributes) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  return e;
}

function drawChart() {
  const chart = at("chart");
  const parts = speeds();
  chart.replaceChildren();
  if (!parts.length) return;
  const [first, end] = [parts[0].from, parts[parts.length - 1].until];
  const top = Math.max(...parts.map((p) => p.all)) * 1.1 || 1;
  const x = (ms) => ((ms - first) / Math.max(1, end - first)) * 1000;
  const y = (value) => 215 - (value / top) * 205;
  let path = "";
  for (const p of parts) path += `${path ? "L" : "M"}${x(p.from).toFixed(1)} ${y(p.all).toFixed(1)}L${x(p.until).toFixed(1)} ${y(p.all).toFixed(1)}`;
  chart.append(svg("path", { class: "area", d: `${path}L1000 215L0 215Z` }), svg("path", { class: "line", d: path }));
  for (const event of state.events) {
    const when = Date.parse(event.time);
    if (when < first || when > end) continue;
    const mark = svg("line", { class: `mark ${event.kind}`, x1: x(when), x2: x(when), y1: 0, y2: 220 });
    const title = svg("title", {});
    title.textContent = `${clock(when)} ${words(event)}`;
    mark.append(title);
    chart.append(mark);
  }
  at("top").textContent = `top: ${top.toFixed(1)} group steps per second; `;
  at("from").textContent = clock(first);
  at("until").textContent = clock(end);
}

function drawRows() {
  const wanted = at("filter").value.toLowerCase();
  const all = [...state.rows.values()].filter((row) => row.id.toLowerCase().includes(wanted));
  all.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || (a.id < b.id ? -1 : 1));
  const body = at("rows");
  const old = new Map([...body.children].map((tr) => [tr.dataset.id, tr]));
  const shown = all.slice(0, MOST_ROWS).map((row) => drawRow(old.get(row.id), row));
  body.replaceChildren(...shown);
  at("more").textContent = all.length > MOST_ROWS ? `and ${all.length - MOST_ROWS} more: search for them` : "";
  const counts = new Map();
  for (const row of state.rows.values()) counts.set(row.state, (counts.get(row.state) || 0) + 1);
  at("counts").textContent = [...counts].map(([name, n]) => `${n} ${name}`).join(", ") || "no replica group has been here yet";
}

function drawRow(tr, row) {
  if (!tr) {
    tr = document.createElement("tr");
    tr.dataset.id = row.id;
    for (let i = 0; i < 8; i++) tr.append(document.createElement("td"));
    const button = element("button", "end it");
    button.addEventListener("click", () => askToKill(row.id));
    tr.children[7].append(button);
    for (const i of [3, 4, 5]) tr.children[i].className = "number";
  }
  const cells = tr.children;
  cells[0].textContent = row.id;
  cells[0].title = row.id;
  cells[1].textContent = row.failures ? `${row.state}, ${row.failures} commits failed` : row.state;
  cells[1].className = row.state;
  cells[2].textContent = ago(row.since);
  cells[3].textContent = row.step;
  cells[4].textContent = row.step_ms ? `${row.step_ms} ms` : "";
  cells[5].textContent = row.ranks || "";
  cells[6].textContent = row.address;
  return tr;
}

function words(event) {
  const parts = [];
  if (event.joined) parts.push(`${event.joined.join(", ")} joined`);
  if (event.left) parts.push(`${event.left.join(", ")} ${event.kind === "failed" ? "failed" : "left"}`);
  if (event.kind === "quorum") parts.push(`${event.members} groups train from step ${event.step}`);
  if (event.reason) parts.push(event.reason);
  return parts.join("; ");
}

let drawnEvent = 0;

function drawEvents() {
  const list = at("events");
  for (const event of state.events) {
    if (event.id <= drawnEvent) continue;
    drawnEvent = event.id;
    const item = element("li");
    const when = element("time", clock(Date.parse(event.time)));
    when.dateTime = event.time;
    item.append(when, element("b", event.kind, event.kind === "quorum" ? "training" : "bad"), element("span", words(event)));
    list.prepend(item);
    if (list.children.length > MOST_EVENTS) list.lastChild.remove();
  }
}

// The other jobs of this lighthouse

const job = new URLSearchParams(location.search).get("job");

async function drawJobs() {
  const all = await (await fetch("jobs")).json();
  at("jobs").hidden = all.length < 2;
  at("jobs").replaceChildren(...all.map((one) => {
    const option = element("option", `${one.job}: ${one.groups} groups, step ${one.max_step}`);
    option.value = one.job;
    option.selected = one.job === (job || "default");
    return option;
  }));
}

at("jobs").addEventListener("change", (event) => { location.search = `?job=${encodeURIComponent(event.target.value)}`; });

// Ending a group

function askToKill(id) {
  at("victim").textContent = id;
  at("refused").textContent = "";
  at("kill").showModal();
}

at("confirm").addEventListener("click", async () => {
  const token = at("token").value;
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  at("refused").textContent = "";
  try {
    const answer = await fetch(`/replica/${encodeURIComponent(at("victim").textContent)}/kill`, { method: "POST", headers });
    if (answer.ok) at("kill").close();
    else at("refused").textContent = await answer.text();
  } catch (error) {
    at("refused").textContent = `The lighthouse does not answer: ${error.message}`;
  }
});

at("filter").addEventListener("input", () => draw(true));
setInterval(() => draw(true), 5000); // ages grow without news

// The connection: the browser makes it anew when it breaks

const source = new EventSource(`api/v1/events${job ? `?job=${encodeURIComponent(job)}` : ""}`);
source.addEventListener("open", () => { at("link").textContent = "live"; at("link").className = "pill live"; });
source.addEventListener("error", () => { at("link").textContent = "connection lost, trying again"; at("link").className = "pill lost"; });
source.addEventListener("whole", (message) => { takeWhole(JSON.parse(message.data)); drawJobs(); });
source.addEventListener("change", (message) => takeChange(JSON.parse(message.data)));
source.addEventListener("event", (message) => { keepEvent(JSON.parse(message.data)); draw(false); });
