// The page of a job: takes what the lighthouse sends and draws it. All text of members goes in as text, never as markup.
"use strict";

const MOST_ROWS = 200; // drawn at once; the search finds the others
const MOST_EVENTS = 300;
const MOST_POINTS = 4000;
const ORDER = ["failed", "stalled", "suspect", "draining", "waiting", "joining", "healing", "standby", "training"];

const EVENT_COLORS = {
  quorum: "training", healed: "training", recovered: "training", scaled: "training",
  drained: "draining", ended: "draining",
  bad_node: "bad", corrupted: "bad", failed: "bad", killed: "bad", refused: "bad", regressed: "bad", skipped: "bad", stacks: "bad",
  stalled: "bad", stopped: "bad", straggler: "bad", waiting: "bad",
};

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

// The time of day, with the date unless it is today's.
function clock(ms) {
  const then = new Date(ms);
  const time = then.toLocaleTimeString([], { hourCycle: "h23" });
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString([], { day: "numeric", month: "short" })} ${time}`;
}

// A replica_id ends in a UUID, whose beginning is enough to identify it. `torchft kill` accepts the beginning of a name.
const short = (text) => text.replace(/(:[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/g, "$1…");

// Messages from the lighthouse

function takeWhole(data) {
  state.rows = new Map(data.rows.map((row) => [row.replica_id, row]));
  state.points = data.points;
  if (data.last < state.lastEvent) { // another lighthouse, which counts from the start
    Object.assign(state, { events: [], lastEvent: 0 });
    drawnEvent = 0;
    at("events").replaceChildren();
  }
  for (const event of data.events) keepEvent(event);
  state.head = data.head;
  draw(true);
}

function takeChange(data) {
  for (const row of data.rows) state.rows.set(row.replica_id, row);
  for (const id of data.removed || []) state.rows.delete(id);
  state.head = data.head;
  if (data.point) {
    state.points.push(data.point);
    if (state.points.length > MOST_POINTS) state.points = state.points.filter((_, i) => i % 2 === 0);
  }
  draw(data.rows.length > 0 || Boolean(data.removed));
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
  at("step").textContent = head.quorum_id ? head.step : "";
  at("groups").textContent = head.groups;
  const step = (head.step_us || 0) / 1e6;
  at("rate").textContent = step ? (1 / step).toFixed(step < 1 ? 1 : 3) : "";
  at("period").textContent = step ? seconds(step) : "";
  at("quorum").textContent = head.quorum_id ? ago(head.quorum_since) : "no quorum yet";
  at("quorum").title = `quorum_id ${head.quorum_id}`;
  const counts = `${head.healthy} alive, ${head.waiting} waiting, at least ${head.min_replicas} needed.`;
  at("reason").textContent = head.reason ? `Next quorum: ${head.reason}. ${counts}` : counts;
  at("reason").className = head.reason ? "stuck" : "";
  at("unkept").textContent = head.unkept ? `The state of the job is not kept on disk: ${head.unkept}` : "";
}

// For each pair of successive points: their times, and the steps per second between them, multiplied by the number of groups.
function speeds() {
  const { points } = state;
  const found = [];
  for (let i = 1; i < points.length; i++) {
    const seconds = (points[i].at - points[i - 1].at) / 1000;
    if (seconds <= 0) continue;
    const steps = (points[i].trained - points[i - 1].trained) / seconds;
    found.push({ from: points[i - 1].at, until: points[i].at, all: steps * points[i].groups });
  }
  return found;
}

function svg(name, attributes) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  return e;
}

// The smallest of these intervals of which at most `most` fit into a span.
const interval = (choices, span, most) => choices.find((choice) => span / choice <= most) || choices.at(-1);
const ROUND = Array.from({ length: 12 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** (i - 3))).flat();
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, ...[1, 2, 5, 10, 30, 100].map((days) => days * 86400)].map((s) => s * 1000);

// A line of the grid and its number. The text is no part of the picture, which is stretched.
function tick(axis, place, text) {
  const label = element("span", text, axis);
  if (axis === "x") label.style.left = `${place / 10}%`;
  else label.style.top = `${place / 2.2}%`;
  at("labels").append(label);
  return svg("line", { class: "tick", ...(axis === "x" ? { x1: place, x2: place, y1: 0, y2: 220 } : { x1: 0, x2: 1000, y1: place, y2: place }) });
}

function drawTicks(chart, x, y, first, end, top) {
  const step = interval(ROUND, top, 5);
  for (let i = 0; i * step <= top; i++) chart.append(tick("y", y(i * step), String(Number((i * step).toPrecision(6)))));
  const every = interval(TIMES, end - first, innerWidth < 640 ? 3 : 7);
  const zone = new Date(first).getTimezoneOffset() * 60000; // whole hours of the clock on the wall
  const format = every < 60000 ? { hour: "2-digit", minute: "2-digit", second: "2-digit" } : every < 86400e3 ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" };
  for (let ms = Math.ceil((first - zone) / every) * every + zone; ms <= end; ms += every) {
    chart.append(tick("x", x(ms), new Date(ms).toLocaleString([], { hourCycle: "h23", ...format })));
  }
}

function drawChart() {
  const chart = at("chart");
  const parts = speeds();
  chart.replaceChildren();
  at("labels").replaceChildren();
  if (!parts.length) return;
  const [first, end] = [parts[0].from, parts[parts.length - 1].until];
  const top = Math.max(...parts.map((p) => p.all)) * 1.1 || 1;
  const x = (ms) => ((ms - first) / Math.max(1, end - first)) * 1000;
  const y = (value) => 215 - (value / top) * 205;
  drawTicks(chart, x, y, first, end, top);
  let path = "";
  for (const p of parts) path += `${path ? "L" : "M"}${x(p.from).toFixed(1)} ${y(p.all).toFixed(1)}L${x(p.until).toFixed(1)} ${y(p.all).toFixed(1)}`;
  chart.append(svg("path", { class: "area", d: `${path}L1000 215L0 215Z` }), svg("path", { class: "line", d: path }));
  const bad = (event) => ["failed", "killed", "stopped", "skipped", "corrupted", "bad_node"].includes(event.kind);
  // Failures are drawn last, over other marks: the quorum without the failed groups begins at almost the same place.
  for (const event of [...state.events].sort((a, b) => bad(a) - bad(b))) {
    const when = Date.parse(event.time);
    if (when < first || when > end) continue;
    const mark = svg("line", { class: `mark ${event.kind}`, x1: x(when), x2: x(when), y1: 0, y2: 220 });
    const title = svg("title", {});
    title.textContent = `${clock(when)} ${words(event)}`;
    mark.append(title);
    chart.append(mark);
  }
}

function drawRows() {
  const wanted = at("filter").value.toLowerCase();
  const all = [...state.rows.values()].filter((row) => row.replica_id.toLowerCase().includes(wanted));
  all.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || (a.replica_id < b.replica_id ? -1 : 1));
  const body = at("rows");
  const old = new Map([...body.children].map((tr) => [tr.dataset.id, tr]));
  const shown = all.slice(0, MOST_ROWS).map((row) => drawRow(old.get(row.replica_id), row));
  body.replaceChildren(...shown);
  at("more").textContent = all.length > MOST_ROWS ? `and ${all.length - MOST_ROWS} more: search for them` : "";
  const counts = new Map();
  for (const row of state.rows.values()) counts.set(row.state, (counts.get(row.state) || 0) + 1);
  at("counts").textContent = [...counts].map(([name, n]) => `${n} ${name}`).join(", ") || "no replica group has been here yet";
}

function drawRow(tr, row) {
  if (!tr) {
    tr = document.createElement("tr");
    tr.dataset.id = row.replica_id;
    for (let i = 0; i < 7; i++) tr.append(document.createElement("td"));
    for (const [text, ask] of [["drain", "drain"], ["end it", "kill"]]) {
      const button = element("button", text, ask);
      button.addEventListener("click", () => askTo(ask, row.replica_id));
      tr.children[6].append(button, " ");
    }
    for (const i of [3, 4]) tr.children[i].className = "number";
  }
  const cells = tr.children;
  cells[0].textContent = short(row.replica_id);
  cells[0].title = row.replica_id;
  const heal = row.heal_total ? ` ${gigabytes(row.heal_received || 0)} of ${gigabytes(row.heal_total)}` : "";
  const phase = row.state === "training" && row.phase && row.phase !== "training" ? `: ${row.phase.replace("_", " ")}` : "";
  cells[1].textContent = row.state + phase + (row.straggler ? ", slower than the others" : "") + heal + (row.commit_failures ? `, ${some(row.commit_failures, "commit")} failed` : "");
  if (row.heal_total) {
    const bar = element("progress");
    bar.max = row.heal_total;
    bar.value = row.heal_received || 0;
    cells[1].append(bar);
  }
  cells[1].title = row.stalled || row.out || row.draining || row.straggler || "";
  cells[1].className = row.state;
  cells[2].textContent = ago(row.since);
  cells[3].textContent = row.step;
  cells[4].textContent = row.world_size || "";
  cells[5].textContent = row.address || "";
  return tr;
}

// The cost of a recovery, and its seconds by phase.
function recovery(event) {
  const phases = (event.phases || []).filter((p) => p.phase !== "total");
  const total = phases.reduce((sum, p) => sum + p.seconds, 0);
  const where = phases.filter((p) => p.seconds >= 0.0005).map((p) => `${p.phase} ${seconds(p.seconds)}`).join(", ");
  const what = event.kind === "healed"
    ? `${event.who} took over the state of step ${event.step || 0} (${gigabytes(event.bytes || 0)})`
    : `${event.who} and the others go on at step ${event.step || 0}, ${some(event.steps_lost || 0, "step")} lost`;
  return `${what}: ${seconds(total)}${where ? ` (${where})` : ""}`;
}

const some = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const seconds = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(1)} s`);
const gigabytes = (bytes) => (bytes < 1e8 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);

// The words for the members that an event names, by its kind, as in torchft/cli/events.py.
const OF_MEMBERS = {
  drained: (who) => `${who} is to leave at the end of a step`,
  ended: (who) => `${who} left`,
  failed: (who) => `${who} failed`,
  killed: (who) => `${who} left`,
  quorum: (who) => `${who} left`,
  refused: (who) => `${who} was refused`,
  stalled: (who) => `the others wait for ${who}`,
  straggler: (who) => `${who} is slower than the others`,
};
// Of events of these kinds the reason says it all. A page that was loaded before an upgrade may get others.
const ONLY_REASON = ["bad_node", "corrupted", "regressed", "scaled", "skipped", "stopped", "waiting"];

function words(event) {
  if (event.kind === "stacks") return `${event.who}, ${event.reason}\n${event.stacks}`;
  const parts = [];
  if (event.joined) parts.push(`${event.joined.join(", ")} joined`);
  if (event.left && !ONLY_REASON.includes(event.kind)) parts.push((OF_MEMBERS[event.kind] || String)(event.left.join(", ")));
  if (["healed", "recovered"].includes(event.kind)) parts.push(recovery(event));
  if (event.kind === "quorum") parts.push(`${some(event.members, "group")} ${event.members === 1 ? "trains" : "train"} from step ${event.step || 0}`);
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
    item.append(when, element("b", event.kind, EVENT_COLORS[event.kind] || "bad"), element("span", short(words(event))));
    item.lastChild.title = words(event);
    list.prepend(item);
    if (list.children.length > MOST_EVENTS) list.lastChild.remove();
  }
}

// After midnight, times that were drawn without a date need one.
function redate() {
  for (const when of at("events").querySelectorAll("time")) when.textContent = clock(Date.parse(when.dateTime));
}

// The other jobs of this lighthouse

const job = new URLSearchParams(location.search).get("job");

async function drawJobs() {
  if (document.activeElement === at("jobs")) return; // the user is choosing a job
  const answer = await fetch("jobs").catch(() => null); // if the lighthouse is unreachable, the connection below reports it
  if (!answer || !answer.ok) return;
  const all = await answer.json();
  at("jobs").hidden = all.length < 2;
  at("jobs").replaceChildren(...all.map((one) => {
    const option = element("option", `${one.job}: ${some(one.groups, "group")}, step ${one.max_step}`);
    option.value = one.job;
    option.selected = one.job === (job || "default");
    return option;
  }));
}

at("jobs").addEventListener("change", (event) => { location.search = `?job=${encodeURIComponent(event.target.value)}`; });

// The lighthouses of a cluster: each describes the cluster itself, also while none leads and the connection below is lost

async function drawCluster() {
  if (!state.head?.cluster) return;
  const answer = await fetch("cluster").catch(() => null);
  if (!answer || !answer.ok) return;
  const cluster = await answer.json();
  const members = cluster.members || [];
  const since = ago(Date.now() - cluster.since_ms);
  const voters = members.filter((one) => one.voter).length;
  at("cluster").hidden = false;
  at("leader").textContent = cluster.leader
    ? `${cluster.leader} has led for ${since}.`
    : `None has led for ${since}: ${Math.floor(voters / 2) + 1} of ${voters} must reach each other. Until then the groups wait.`;
  at("leader").className = cluster.leader ? "" : "stuck";
  at("trouble").textContent = cluster.trouble ? `${cluster.self}: ${cluster.trouble}` : "";
  at("lighthouses").replaceChildren(...members.map((one) => {
    const tr = element("tr");
    const [name, className] = one.leads ? ["leader", "training"] : !one.voter ? ["not in the cluster", "waiting"] : one.reached ? ["follower", ""] : ["not reached", "failed"];
    tr.append(element("td", one.address), element("td", name, className));
    return tr;
  }));
}

// The snapshots that the keepers of the hosts hold

async function drawKeepers() {
  at("keepers").hidden = !state.head?.keepers;
  if (at("keepers").hidden) return;
  const answer = await fetch(`api/v1/keepers?job=${encodeURIComponent(job || "default")}`).catch(() => null);
  if (!answer || !answer.ok) return;
  const keepers = (await answer.json()).keepers;
  const all = (kind) => keepers.flatMap((one) => (one[kind] || []).map((each) => ({ host: one.host, ...each })));
  const held = all("snapshots");
  at("slots").replaceChildren(...held.slice(0, MOST_ROWS).map((slot) => {
    const tr = element("tr");
    const why = slot.incomplete;
    tr.append(element("td", slot.host), element("td", slot.group), element("td", slot.group_rank, "number"),
      element("td", why ? "" : slot.step, "number"), element("td", gigabytes(slot.bytes), "number"),
      element("td", why ? "" : ago(1000 * slot.saved), "number"), element("td", why || "complete", why ? "waiting" : "training"));
    return tr;
  }));
  const disks = all("disks");
  at("disks").hidden = disks.length === 0;
  at("disks").tBodies[0].replaceChildren(...disks.slice(0, MOST_ROWS).map((disk) => {
    const tr = element("tr");
    const [what, className] = disk.problem ? [`for ${ago(1000 * disk.since)}: ${disk.problem}`, "failed"]
      : disk.writing !== undefined ? [`writes step ${disk.writing}: ${gigabytes(disk.bytes)} in ${ago(1000 * disk.since)}`, "waiting"]
      : disk.written < 0 ? ["none", "waiting"] : ["complete", "training"];
    tr.append(element("td", disk.host), element("td", disk.folder), element("td", disk.written < 0 ? "" : disk.written, "number"), element("td", what, className));
    return tr;
  }));
}

// Ending a group

const ASKS = {
  kill: { title: "End this group?", what: "Its manager's process ends at once. The other groups lose the step that they are in, and go on without it.", button: "End it" },
  drain: { title: "Let this group leave?", what: "It takes part in one step more and ends then, if its script heeds Manager.draining(). Nobody loses a step.", button: "Let it leave" },
};
let asked = { what: "kill", id: "" };

function askTo(what, id) {
  asked = { what, id };
  at("question").textContent = ASKS[what].title;
  at("victim").textContent = id;
  at("consequence").textContent = ASKS[what].what;
  at("confirm").textContent = ASKS[what].button;
  at("refused").textContent = "";
  at("ask").showModal();
}

at("confirm").addEventListener("click", async () => {
  const headers = { "Content-Type": "application/json" };
  if (at("token").value) headers.Authorization = `Bearer ${at("token").value}`;
  at("refused").textContent = "";
  try {
    const answer = await fetch(`api/v1/${asked.what}?job=${encodeURIComponent(job || "default")}`, { method: "POST", headers, body: JSON.stringify({ replica_id: asked.id }) });
    if (answer.ok) at("ask").close();
    else at("refused").textContent = (await answer.json()).error;
  } catch (error) {
    at("refused").textContent = `The lighthouse does not answer: ${error.message}`;
  }
});

at("filter").addEventListener("input", () => draw(true));
setInterval(() => draw(true), 5000); // ages grow without news
setInterval(redate, 60000);
setInterval(drawJobs, 10000);
setInterval(drawCluster, 2000);
setInterval(drawKeepers, 2000);

// The connection: the browser reconnects when it breaks, but not if it was refused

const AGAIN_MS = 5000;

function connect() {
  const query = new URLSearchParams(job ? { job } : {});
  if (state.lastEvent) query.set("after", state.lastEvent);
  const source = new EventSource(`api/v1/events?${query}`);
  source.addEventListener("open", () => { at("link").textContent = "live"; at("link").className = "pill live"; });
  source.addEventListener("error", () => {
    at("link").textContent = "connection lost, trying again";
    at("link").className = "pill lost";
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  });
  source.addEventListener("whole", (message) => { takeWhole(JSON.parse(message.data)); drawJobs(); drawCluster(); drawKeepers(); });
  source.addEventListener("change", (message) => takeChange(JSON.parse(message.data)));
  source.addEventListener("event", (message) => { keepEvent(JSON.parse(message.data)); draw(false); });
}

connect();
