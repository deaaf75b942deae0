"use strict";
// All texts of the job are untrusted: they enter the page as textContent only.
const $ = (id) => document.getElementById(id);
const DENSE = 64; // slots from which the map shows only ranks
const RATE_S = 15; // time over which ticks per second are counted
const SILENT_MS = 6000; // the driver sends something every two seconds
const STATES = ["member", "ready", "booting", "draining", "stopping", "empty"];
const SHOWN_FAILURES = 5;
const TIMES = {
  goodput: "steps that were kept", boot: "workers start", waiting_for_hosts: "too few hosts", world_formation: "workers connect",
  sync: "new workers get the state", regroup: "from a failure or change to the next world", drain: "workers leave as planned",
  redone_ticks: "steps done again", commit_stall: "saving in memory", no_ticks: "no step was completed", no_driver: "without a driver", exit: "the job ends",
};
let view = {}, token = "", ahead = 0, isOver = false, samples = [], cells = new Map(), rows = new Map();
let selected = "", outputs = null;

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
function setText(element, text) { if (element.textContent !== text) element.textContent = text; }
const now = () => Date.now() / 1000 + ahead;
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
function span(s) {
  if (s < 0) s = 0;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;
}
const age = (at) => at === undefined ? "none yet" : `${span(now() - at)} ago`;
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const percent = (x) => `${(100 * x).toFixed(1)} %`;
function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < 4) { n /= 1000; unit++; }
  return `${n.toFixed(n < 10 && unit ? 1 : 0)} ${units[unit]}`;
}
const plain = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const dictionary = () => Object.create(null); // a host may have the name of a property of objects, like __proto__
const parse = (text) => JSON.parse(text, (_, value) => plain(value) ? Object.assign(dictionary(), value) : value);
function merge(target, patch) { // RFC 7396
  if (!plain(patch)) return patch;
  const result = plain(target) ? target : dictionary();
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key]; else result[key] = merge(result[key], value);
  }
  return result;
}

// ------------------------------------------------------------------------------------------------------ the numbers

function facts(list, shown) { // shown: title, value, more
  const titles = JSON.stringify(shown.map(([title]) => title));
  if (list.dataset.titles !== titles) {
    list.dataset.titles = titles;
    list.replaceChildren(...shown.map(([title]) => {
      const group = make("div"), value = make("dd");
      value.append(make("span"), make("small"));
      group.append(make("dt", title), value);
      return group;
    }));
  }
  shown.forEach(([, value, more], i) => {
    const [first, second] = list.children[i].querySelectorAll("span, small");
    setText(first, value); setText(second, more);
  });
}
function numbers() {
  const f = view.figures, w = view.world, c = view.commit, list = $("numbers");
  const shown = [
    ["generation", `${w.generation}`, count(f.failures, "failure")],
    ["workers", `${w.living} of ${w.size}`, count(Object.values(view.hosts).filter((h) => h.slots).length, "host")],
    ["ticks per second", rate(), `${f.ticks} ticks, ${f.ticks_lost} redone`],
    ["goodput", f.goodput === undefined ? "none yet" : percent(f.goodput), `of ${span(f.wall_s)}`],
    ["downtime", f.downtime_s === undefined ? "unknown" : span(f.downtime_s), `${f.commits_lost} commits lost`],
    ["newest commit", c ? c.id : "none yet", c ? [c.bytes ? `${bytes(c.bytes)} a worker` : "", c.at ? age(c.at) : "", `stall ${span(c.stall_s)}`].filter(Boolean).join(", ") : ""],
  ];
  facts(list, shown);
}
function sample(at) {
  samples.push([at, view.figures.ticks, view.shards ? view.shards.sent_bytes : 0]);
  if (samples.length > 120) samples.shift();
}
function perSecond(i) { // of the samples' number i; undefined at the start
  const last = samples[samples.length - 1], first = samples.find((s) => s[0] >= last[0] - RATE_S);
  return last[0] - first[0] < 0.9 ? undefined : Math.max(0, (last[i] - first[i]) / (last[0] - first[0]));
}
function rate() {
  const ticks = perSecond(1);
  return ticks === undefined ? "…" : ticks.toFixed(2);
}
function sharded(s) {
  const shown = [["commit line", s.line || "none yet", s.line ? age(s.line_at) : ""]];
  if (s.replicas) {
    const on = `on ${count(s.replicas, "other host")}`, r = s.replication;
    shown.push(["replicated commit", s.replicated || "none yet", s.replicated ? `${age(s.replicated_at)}, ${on}` : on]);
    shown.push(r ? ["replication", `${r.done} of ${r.copies} copies`, `of ${r.commit}, for ${span(now() - r.since)}`]
      : ["replication", s.replicated && s.replicated === s.line ? "complete" : "waits", ""]);
  } else shown.push(["replicas", "none", ""]);
  const memory = Object.values(s.memory);
  if (s.copies || memory.length) {
    const total = memory.reduce((sum, n) => sum + n, 0), speed = perSecond(2);
    shown.push(["memory of copies", bytes(total), `${s.copies} ${s.copies === 1 ? "copy" : "copies"} on ${count(memory.length, "host")}, at most ${bytes(Math.max(0, ...memory))} on one`]);
    shown.push(["sent between hosts", speed === undefined ? "…" : `${bytes(speed)}/s`, `${bytes(s.sent_bytes)} in all`]);
  }
  return shown;
}
function commits() {
  const s = view.shards, d = view.durable;
  $("commits").hidden = !s && !d;
  if (!s && !d) return;
  const shown = s ? sharded(s) : [];
  if (d) {
    shown.push(["newest durable copy", d.commit || "none yet", d.commit ? [age(d.at), d.bytes ? bytes(d.bytes) : ""].filter(Boolean).join(", ") : ""]);
    shown.push(["durable copies", `${d.saved} saved`, `${d.failed} failed`]);
  }
  facts($("commit-facts"), shown);
  const troubles = [];
  if (s && s.trouble) troubles.push(`Replication: ${s.trouble}`);
  if (d && d.trouble) troubles.push(`Durable copies: the last attempt failed: ${d.trouble}`);
  $("commit-troubles").hidden = !troubles.length;
  list($("commit-troubles"), troubles);
  const hosts = s ? Object.entries(s.memory) : [];
  $("copies").hidden = !hosts.length;
  if ($("copies").open) list($("copies-by-host"), hosts.sort((a, b) => b[1] - a[1]).map(([name, n]) => [name, (view.hosts[name] || {}).rack || "", bytes(n)]), ([name, ...cells]) => {
    const row = make("tr");
    row.append(make("th", name, { scope: "row" }), ...cells.map((text) => make("td", text)));
    return row;
  });
}
function times() {
  const f = view.figures, parts = [["goodput", f.goodput_s], ...Object.entries(f.badput_s).sort((a, b) => b[1] - a[1])];
  const table = $("time"), bar = $("time-bar");
  table.replaceChildren(...parts.map(([name, s]) => {
    const row = make("tr"), head = make("th", TIMES[name] || name.replaceAll("_", " "), { scope: "row" });
    if (TIMES[name]) head.append(make("small", ` (${name.replaceAll("_", " ")})`));
    row.append(head, make("td", s.toFixed(1)), make("td", percent(s / Math.max(f.wall_s, 1e-9))));
    return row;
  }));
  bar.replaceChildren(...parts.map(([name, s]) => {
    const part = make("span", "", { class: name === "goodput" ? "good" : "bad", title: TIMES[name] || name.replaceAll("_", " ") });
    part.style.flexGrow = s;
    return part;
  }));
}

// ---------------------------------------------------------------------------------------------------------- the map

const isDense = () => $("map").classList.contains("dense");
const LONGEST_NAME = 13; // characters, in the dense map
function brief(names) { // without the domain that all of them have, and of a long rest the end, in which names differ
  const isName = names.length > 1 && names[0].includes(".") && !/^[\d.]+$/.test(names[0]);
  let domain = isName ? names[0].slice(names[0].indexOf(".")) : "";
  while (domain && !names.every((name) => name.endsWith(domain) && name.length > domain.length)) {
    const next = domain.indexOf(".", 1);
    domain = next < 0 ? "" : domain.slice(next);
  }
  return new Map(names.map((name) => {
    const rest = name.slice(0, name.length - domain.length);
    return [name, rest.length > LONGEST_NAME ? `…${rest.slice(1 - LONGEST_NAME)}` : rest];
  }));
}
function mapShape() {
  const map = $("map"), hosts = Object.entries(view.hosts);
  const slots = new Map(hosts.map(([name, host]) => [name, host.slots]));
  for (const key of Object.keys(view.workers)) {
    const at = key.lastIndexOf(":"), host = key.slice(0, at);
    slots.set(host, Math.max(slots.get(host) || 0, Number(key.slice(at + 1)) + 1));
  }
  const shown = hosts.filter(([name]) => slots.get(name)).sort(([, a], [, b]) => a.order - b.order).map(([name]) => name);
  const total = shown.reduce((sum, name) => sum + slots.get(name), 0);
  const shape = JSON.stringify(shown.map((name) => [name, slots.get(name)]));
  if (map.dataset.shape === shape) return;
  map.dataset.shape = shape;
  map.classList.toggle("dense", total > DENSE);
  const focused = document.activeElement && document.activeElement.dataset.slot, names = isDense() ? brief(shown) : new Map();
  cells.clear(); rows.clear();
  map.replaceChildren(...shown.map((name) => {
    const row = make("div", "", { role: "row" }), head = make("div", "", { role: "rowheader" });
    head.append(make("span", names.get(name) || name), make("small"));
    const drain = make("button", "Drain …", { type: "button", "aria-label": `Drain host ${name}` });
    drain.tabIndex = -1;
    drain.addEventListener("click", () => askDrain(name));
    head.append(drain);
    row.append(head);
    rows.set(name, head);
    for (let i = 0; i < slots.get(name); i++) {
      const cell = make("div", "", { role: "gridcell", "data-slot": `${name}:${i}`, tabindex: -1 });
      cells.set(`${name}:${i}`, cell);
      row.append(cell);
    }
    return row;
  }));
  if (!cells.has(selected)) selected = "";
  const first = cells.get(selected) || cells.values().next().value;
  if (first) first.tabIndex = 0;
  if (focused && cells.has(focused)) focusCell(cells.get(focused));
}
const worker = (slot) => view.workers[slot] || { state: "empty", why: "has had no worker yet" };
function about(slot) {
  const w = worker(slot), words = [slot, w.state];
  if (w.rank !== undefined) words.push(`rank ${w.rank}`);
  if (w.state === "empty") words.push(w.why);
  else {
    words.push(`in ${w.place}`, `tick ${w.tick}`, `heartbeat ${age(w.seen)}`);
    words.push(w.commit ? `commit ${w.commit} ${w.commit_at ? age(w.commit_at) : ""}`.trim() : "no commit yet");
    if (w.why) words.push(w.why);
  }
  return words.join(", ");
}
function paint(slot, cell) {
  const w = worker(slot), dense = isDense();
  const classes = w.state + (slot === selected ? " selected" : "");
  if (cell.className !== classes) cell.className = classes;
  cell.setAttribute("aria-selected", slot === selected);
  if (dense) {
    setText(cell, w.state === "member" ? `${w.rank}` : w.state === "empty" ? "–" : w.state[0].toUpperCase());
    cell.title = `${slot} ${w.state}`;
    cell.setAttribute("aria-label", `${slot}, ${w.state}${w.rank === undefined ? "" : `, rank ${w.rank}`}`);
    return;
  }
  const lines = [w.rank === undefined ? `slot ${slot.slice(slot.lastIndexOf(":") + 1)}` : `rank ${w.rank}`, w.state];
  if (w.state === "empty") lines.push(w.why);
  else lines.push(`tick ${w.tick}`, `heartbeat ${age(w.seen)}`, w.commit ? `commit ${w.commit_at ? age(w.commit_at) : w.commit}` : "no commit yet");
  if (cell.children.length !== lines.length) cell.replaceChildren(...lines.map((_, i) => make(i ? "div" : "b")));
  lines.forEach((line, i) => setText(cell.children[i], line));
}
function paintHost(name) {
  const host = view.hosts[name], head = rows.get(name);
  if (!head) return;
  const words = host.why ? `${host.state}: ${host.why}` : host.state, state = host.rack ? `${words}, rack ${host.rack}` : words;
  setText(head.children[1], isDense() && host.state === "joined" ? "" : state);
  head.title = `${name}: ${host.state}${host.rack ? `, rack ${host.rack}` : ""}`;
  head.children[2].disabled = isOver || host.state !== "joined";
}
function map(patch) {
  if (patch.hosts || patch.workers) mapShape();
  const all = $("map").dataset.painted !== $("map").dataset.shape;
  $("map").dataset.painted = $("map").dataset.shape;
  for (const [slot, cell] of cells) if (all || (patch.workers && slot in patch.workers)) paint(slot, cell);
  for (const name of rows.keys()) if (all || (patch.hosts && name in patch.hosts)) paintHost(name);
  const number = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const slot of cells.keys()) number[worker(slot).state]++;
  const words = STATES.filter((s) => number[s]).map((s) => `${number[s]} ${s}`).join("|");
  if ($("legend").dataset.words !== words) {
    $("legend").dataset.words = words;
    $("legend").replaceChildren(...STATES.filter((s) => number[s]).map((s) => {
      const item = make("span");
      item.append(make("i", "", { class: s, "aria-hidden": "true" }), `${number[s]} ${s}`);
      return item;
    }));
  }
}
function focusCell(cell) {
  for (const other of $("map").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
}
function move(event) {
  const cell = event.target.closest("[role=gridcell]");
  if (!cell) return;
  const row = [...cell.parentElement.querySelectorAll("[role=gridcell]")], i = row.indexOf(cell);
  const beside = (r) => r && (r.querySelectorAll("[role=gridcell]")[i] || r.querySelector("[role=gridcell]:last-child"));
  const to = {
    ArrowRight: () => row[i + 1], ArrowLeft: () => row[i - 1], Home: () => row[0], End: () => row[row.length - 1],
    ArrowDown: () => beside(cell.parentElement.nextElementSibling), ArrowUp: () => beside(cell.parentElement.previousElementSibling),
    Enter: () => (select(cell.dataset.slot), cell), " ": () => (select(cell.dataset.slot), cell),
  }[event.key];
  if (!to) return;
  event.preventDefault();
  const next = to();
  if (next) focusCell(next);
}
function select(slot) {
  if (outputs) outputs.abort();
  const before = selected;
  selected = slot;
  for (const s of [before, slot]) if (cells.has(s)) paint(s, cells.get(s));
  const host = slot.slice(0, slot.lastIndexOf(":"));
  const drain = make("button", `Drain host ${host} …`, { type: "button" });
  drain.addEventListener("click", () => askDrain(host));
  const stdout = make("pre", "", { tabindex: "0", role: "log", "aria-live": "off", "aria-label": `stdout of ${slot}` });
  const stderr = make("pre", "", { tabindex: "0", role: "log", "aria-live": "off", "aria-label": `stderr of ${slot}` });
  $("detail").replaceChildren(make("p", about(slot)), drain, make("h3", "stdout"), stdout, make("h3", "stderr"), stderr);
  outputs = new AbortController();
  follow(`output?slot=${encodeURIComponent(slot)}`, (kind, message) => {
    for (const [pre, text] of [[stdout, message.stdout], [stderr, message.stderr]]) {
      const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
      setText(pre, text || "(nothing)");
      if (atEnd) pre.scrollTop = pre.scrollHeight;
    }
  }, outputs.signal);
}

// ---------------------------------------------------------------------------------------------- curves, marks and use

const KINDS = { // of marks: words, and a shape, so that they differ without colours
  failure: ["worker or host lost", "M2 2L10 10M10 2L2 10"], hang: ["worker hung", "M2 2H10V10H2Z"], drain: ["left as planned", "M1.5 2H10.5L6 10.5Z"],
  join: ["joined", "M6 1.5L10.5 10H1.5Z"], restart: ["driver restarted", "M6 .5L11.5 6L6 11.5L.5 6Z"],
};
const MARK_PX = 18, LANES = 3;
let shownUntil = 0, chosen = ""; // number of the mark whose text is shown; "": the newest
function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
function shape(kind) {
  const image = svg("svg", { class: `shape ${kind}`, viewBox: "0 0 12 12", "aria-hidden": "true" });
  image.append(svg("path", { d: KINDS[kind][1] }));
  return image;
}
function short(value) {
  if (typeof value !== "number") return value;
  const size = Math.abs(value);
  return size && (size >= 1e6 || size < 1e-3) ? value.toExponential(2) : `${Number(value.toPrecision(4))}`;
}
function axis() { // begin and length of the time axis
  const { curves, marks } = view.charts, firsts = [now() - 10];
  for (const c of Object.values(curves)) { const first = Object.values(c.points)[0]; if (first) firsts.push(first[0]); }
  for (const each of [Object.values(marks)[0], Object.values(view.generations)[0]]) if (each) firsts.push(each.at);
  if (!isOver) shownUntil = now();
  const from = Math.min(...firsts);
  return [from, Math.max(1, shownUntil - from)];
}
function overTime() {
  const [from, length] = axis(), at = (t) => Math.min(100, Math.max(0, 100 * (t - from) / length));
  for (const text of $("over-time").querySelectorAll(".axis span:first-child")) setText(text, `${span(length)} ago`);
  paintMarks(at);
  const marks = Object.values(view.charts.marks), keys = Object.keys(view.charts.curves).sort((a, b) => rankOf(a) - rankOf(b));
  const shown = new Map([...$("curves").children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, i) => {
    const figure = shown.get(key) || chart(key);
    if ($("curves").children[i] !== figure) $("curves").insertBefore(figure, $("curves").children[i] || null);
    paintChart(figure, key, view.charts.curves[key], marks, at);
  });
}
const OWN = ["ticks per second", "processors", "memory", "GPUs", "memory of GPUs"];
function rankOf(key) { // values of scripts first, in their order
  const name = key.slice(key.indexOf(":") + 1);
  return key.startsWith("own:") ? 1000 + OWN.indexOf(name) : 0;
}
function chart(key) {
  const figure = make("figure", "", { "data-key": key }), caption = make("figcaption"), plot = make("div", "", { class: "plot" });
  const image = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
  image.append(svg("g", {}), svg("path", {}));
  caption.append(make("span", key.slice(key.indexOf(":") + 1)), make("b"));
  plot.append(image, make("small"), make("small"));
  figure.append(caption, plot, make("p"));
  return figure;
}
function paintChart(figure, key, curve, marks, at) {
  const points = Object.values(curve.points), numbers = points.map((p) => p[1]).filter((v) => typeof v === "number");
  const isOwn = key.startsWith("own:"), isPercent = isOwn && key !== "own:ticks per second", name = key.slice(key.indexOf(":") + 1);
  let least = Math.min(...numbers), most = Math.max(...numbers);
  if (isOwn) { least = 0; most = isPercent ? 100 : Math.max(most, 1e-9); }
  const height = (v) => most > least ? 97 - 94 * (v - least) / (most - least) : 50;
  let d = "", isOpen = false;
  for (const [t, v] of points) {
    if (typeof v !== "number") { isOpen = false; continue; }
    const point = `${at(t).toFixed(2)} ${height(v).toFixed(2)}`;
    d += isOpen ? `L${point}` : `M${point}h0`; // h0: a point between two gaps is a dot
    isOpen = true;
  }
  const [caption, plot, about] = figure.children, [group, path] = plot.firstChild.children;
  path.setAttribute("d", d);
  const places = marks.map((m) => `${m.kind} ${at(m.at).toFixed(2)}`).join();
  if (group.dataset.places !== places) {
    group.dataset.places = places;
    group.replaceChildren(...marks.map((m) => svg("line", { class: m.kind, x1: at(m.at), x2: at(m.at), y1: 0, y2: 100 })));
  }
  const newest = points.length ? points[points.length - 1][1] : "", m = isOwn ? undefined : view.metrics[name];
  const unit = isPercent ? " %" : "", value = m ? m.value : newest;
  setText(caption.children[1], isPercent && typeof value === "number" ? `${value.toFixed(0)} %` : short(value));
  setText(plot.children[1], numbers.length ? short(most) + unit : ""); setText(plot.children[2], most > least ? short(least) + unit : "");
  setText(about, isOwn ? ownWords(name) : m ? metricWords(m) : "of an earlier driver");
  plot.firstChild.setAttribute("aria-label", `${name}: newest ${short(value)}${unit}${numbers.length ? `, from ${short(Math.min(...numbers))} to ${short(Math.max(...numbers))}` : ""}`);
}
function ownWords(name) {
  const hosts = Object.values(view.hosts).filter((h) => h.use && (!name.includes("GPU") || h.use.gpus)).length;
  return name === "ticks per second" ? "of the job" : hosts > 1 ? `of ${count(hosts, "host")} together` : "of the host";
}
function metricWords(m) {
  const words = [m.rank === undefined ? "of a worker without a rank" : `of rank ${m.rank}`];
  if (m.workers > 1 && m.least !== undefined) words.push(`${m.workers} ranks: ${short(m.least)} to ${short(m.greatest)}`);
  if (m.strange) words.push(`${m.strange} not finite`);
  return words.join("; ");
}
function paintMarks(at) {
  const parent = $("marks"), marks = Object.entries(view.charts.marks), used = Object.keys(KINDS).filter((kind) => marks.some(([, m]) => m.kind === kind));
  if (parent.dataset.kinds !== `${used}`) {
    parent.dataset.kinds = `${used}`;
    $("mark-legend").replaceChildren(...used.map((kind) => {
      const item = make("li");
      item.append(shape(kind), KINDS[kind][0]);
      return item;
    }));
  }
  keyed(parent, view.charts.marks, (m) => {
    const button = make("button", "", { type: "button", class: m.kind, tabindex: -1 });
    button.append(shape(m.kind));
    return button;
  });
  if (!(chosen in view.charts.marks)) chosen = "";
  const current = chosen || (marks.length ? marks[marks.length - 1][0] : ""), ends = new Array(LANES).fill(-Infinity), width = parent.clientWidth;
  for (const button of parent.children) {
    const m = view.charts.marks[button.dataset.id], x = at(m.at) * width / 100, free = ends.findIndex((end) => x >= end);
    const lane = free < 0 ? ends.indexOf(Math.min(...ends)) : free, isCurrent = button.dataset.id === current;
    ends[lane] = x + MARK_PX;
    button.style.left = `${at(m.at)}%`;
    button.style.bottom = `${lane * MARK_PX}px`;
    button.tabIndex = isCurrent ? 0 : -1;
    button.setAttribute("aria-pressed", isCurrent);
    const label = `${clock(m.at)}, ${KINDS[m.kind][0]}: ${m.text}`;
    if (button.title !== label) { button.title = label; button.setAttribute("aria-label", label); }
  }
  const text = $("mark-text"), m = view.charts.marks[current], key = m ? `${m.at} ${m.text}` : "";
  parent.hidden = !m;
  if (text.dataset.key === key) return;
  text.dataset.key = key;
  text.replaceChildren(...(m ? [shape(m.kind), ` ${clock(m.at)}  ${m.text}`] : ["Nothing has changed the world so far."]));
}
function chooseMark(button) {
  chosen = button.dataset.id;
  overTime();
  button.focus();
}
function moveMark(event) {
  const all = [...$("marks").children], i = all.indexOf(event.target.closest("button"));
  const to = { ArrowLeft: all[i - 1], ArrowRight: all[i + 1], Home: all[0], End: all[all.length - 1] }[event.key];
  if (i < 0 || !to) return;
  event.preventDefault();
  chooseMark(to);
}
function use() {
  const hosts = Object.entries(view.hosts).filter(([, h]) => h.use).sort(([, a], [, b]) => a.order - b.order);
  const withGpus = hosts.some(([, h]) => h.use.gpus);
  $("use").hidden = !hosts.length;
  for (const title of $("use").querySelectorAll("thead th:nth-child(n+4)")) title.hidden = !withGpus;
  $("use-by-host").replaceChildren(...hosts.map(([name, { use: u }]) => {
    const row = make("tr");
    row.append(make("th", name, { scope: "row" }), share("processors", u.cpu, u.cpu === undefined ? "…" : percent(u.cpu)),
      share("memory", u.memory_bytes / u.memory_total_bytes, `${bytes(u.memory_bytes)} of ${bytes(u.memory_total_bytes)}`));
    if (withGpus && u.gpus) {
      row.append(share("GPUs", u.gpu, `${u.gpus} × ${u.gpu === undefined ? "unknown" : percent(u.gpu)}`));
      row.append(share("memory of GPUs", u.gpu_memory_bytes / u.gpu_memory_total_bytes, `${bytes(u.gpu_memory_bytes)} of ${bytes(u.gpu_memory_total_bytes)}`));
    } else if (withGpus) row.append(make("td", "none", { "data-label": "GPUs" }), make("td"));
    return row;
  }));
}
function share(title, part, text) {
  const cell = make("td", "", { "data-label": title });
  if (Number.isFinite(part)) {
    const bar = make("span", "", { class: "part", "aria-hidden": "true" }), filled = make("span");
    filled.style.width = `${100 * Math.min(1, part)}%`;
    bar.append(filled);
    cell.append(bar);
  }
  cell.append(text);
  return cell;
}

// ------------------------------------------------------------------------------------------------- history and lists

function list(parent, items, build = (text) => make("li", text)) {
  const key = JSON.stringify(items);
  if (parent.dataset.key === key) return;
  parent.dataset.key = key;
  parent.replaceChildren(...items.map(build));
}
function cooldowns() {
  const hosts = Object.entries(view.hosts).sort(([, a], [, b]) => a.order - b.order);
  const inUse = hosts.filter(([, h]) => h.slots);
  const lines = [`${count(inUse.length, "host")}, ${count(inUse.reduce((n, [, h]) => n + h.slots, 0), "slot")}`];
  for (const [name, h] of hosts) {
    if (h.cooldown_until > now()) lines.push(`${name}: in cooldown for ${span(h.cooldown_until - now())}: ${h.cooldown}`);
    else if (h.state !== "joined") lines.push(`${name}: ${h.state}${h.why ? `: ${h.why}` : h.report ? `: ${h.report}` : ""}`);
  }
  list($("cooldowns"), lines);
}
function generations() {
  const all = Object.entries(view.generations);
  const seconds = (g) => (g.until || now()) - g.at;
  $("generations").replaceChildren(...all.slice().reverse().map(([number, g]) => {
    const row = make("tr"), change = [g.joined && `joined: ${g.joined}`, g.left && `left: ${g.left}`].filter(Boolean).join("; ");
    const resumed = g.downtime_s === undefined ? "" : span(g.downtime_s) + (g.ticks_lost ? `, ${g.ticks_lost} ticks redone` : "");
    const titles = ["began", "duration", "goodput", "workers", "cause", "change", "resumed after"];
    row.append(make("th", number, { scope: "row", "data-label": "generation" }), ...[clock(g.at), span(seconds(g)), g.wall_s ? percent(g.goodput_s / g.wall_s) : "",
      `${g.size} on ${g.hosts} ${g.hosts === 1 ? "host" : "hosts"}`, g.cause, change, resumed].map((text, i) => make("td", text, { "data-label": titles[i] })));
    return row;
  }));
  $("timeline").replaceChildren(...all.map(([number, g], i) => {
    const part = make("span", "", { class: i % 2 ? "planned" : "good", title: `generation ${number}: ${g.cause}` });
    part.style.flexGrow = Math.max(seconds(g), 0.01);
    return part;
  }));
}
function keyed(parent, entries, build, newestFirst = false) {
  const known = new Map([...parent.children].map((child) => [child.dataset.id, child]));
  for (const [id, child] of known) if (!(id in entries)) child.remove();
  for (const [id, entry] of Object.entries(entries)) {
    if (known.has(id)) continue;
    const child = build(entry);
    child.dataset.id = id;
    if (newestFirst) parent.prepend(child); else parent.append(child);
  }
}
function failures() { // the newest first; none of them goes when the job has recovered
  const entries = Object.entries(view.failures), shown = entries.slice(-SHOWN_FAILURES), rest = entries.slice(0, -SHOWN_FAILURES);
  const more = $("more-failures"), lost = view.failed - entries.length;
  $("no-failures").hidden = entries.length > 0;
  $("failed").hidden = !view.failed;
  setText($("failed"), count(view.failed, "failure"));
  more.hidden = !rest.length;
  setText(more.querySelector("summary"), `${count(rest.length, "earlier failure")}${lost > 0 ? `, and ${lost} that are not kept` : ""}`);
  for (const [id] of rest) { // an opened one stays open
    const moved = [...$("failures").children].find((child) => child.dataset.id === id);
    if (moved) more.querySelector("div").prepend(moved);
  }
  keyed(more.querySelector("div"), Object.fromEntries(rest), failure, true);
  keyed($("failures"), Object.fromEntries(shown), failure, true);
}
function failure(f) {
  const place = [f.rank === undefined ? "" : `rank ${f.rank}`, f.generation ? `generation ${f.generation}` : ""].filter(Boolean).join(", ");
  const title = `${clock(f.at)}  ${f.reason}${place ? ` (${place})` : ""}`;
  if (!f.error) return make("p", title);
  const details = make("details");
  details.append(make("summary", title), make("pre", f.error, { tabindex: "0" }));
  return details;
}
function lines() {
  const parent = $("lines"), atEnd = parent.scrollTop + parent.clientHeight >= parent.scrollHeight - 8;
  keyed(parent, view.lines, (entry) => {
    const item = make("li");
    item.append(make("time", clock(entry.at)), entry.text);
    return item;
  });
  if (atEnd) parent.scrollTop = parent.scrollHeight;
}
function head() {
  const job = view.job;
  document.title = `${job.name}: ${job.phase}`;
  setText($("name"), job.name); setText($("phase"), job.phase); setText($("ask-job"), job.name);
  $("phase").className = `badge ${job.phase}`;
  setText($("reason"), job.reason);
  $("end").disabled = job.is_over || isOver;
}
function render(patch) {
  if (patch.job) head();
  numbers(); commits();
  if (patch.figures) times();
  map(patch);
  if (patch.generations) generations();
  if (patch.failures || patch.failed) failures();
  overTime();
  if (patch.hosts) use();
  if (patch.lines) lines();
  $("waiting").hidden = !view.waiting.length;
  list($("waiting").querySelector("ul"), view.waiting);
  $("stragglers").hidden = !(view.stragglers && view.stragglers.length);
  list($("stragglers").querySelector("ul"), view.stragglers || []);
  cooldowns();
}
setInterval(() => { // ages grow without any message
  if (!view.job || isOver) return;
  if (!isDense()) for (const [slot, cell] of cells) paint(slot, cell);
  if (selected && $("detail").firstElementChild) setText($("detail").firstElementChild, about(selected));
  numbers(); commits(); cooldowns(); overTime();
  const row = $("generations").firstElementChild, newest = Object.values(view.generations).pop();
  if (row && newest && !newest.until) setText(row.children[2], span(now() - newest.at));
}, 1000);

// ------------------------------------------------------------------------------------------------------- the streams

const headers = () => token ? { Authorization: `Bearer ${token}` } : {};
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
class Refused extends Error {}

async function read(path, received, signal) { // server-sent events; EventSource cannot send the token
  const ending = new AbortController(), stop = () => ending.abort();
  if (signal) signal.addEventListener("abort", stop);
  let watch = setTimeout(stop, SILENT_MS);
  try {
    const response = await fetch(path, { headers: headers(), signal: ending.signal, cache: "no-store" });
    if (response.status === 401) throw new Refused(await response.text());
    if (!response.ok) throw new Error(await response.text());
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watch);
      watch = setTimeout(stop, SILENT_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [first, data] = part.split("\n");
        if (data) received(first.slice(7), parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(watch);
    if (signal) signal.removeEventListener("abort", stop);
  }
}
async function follow(path, received, signal) { // connects again, for example after a restart of the driver
  while (!(signal && signal.aborted) && !isOver) {
    try { await read(path, received, signal); } catch (error) {
      if (error instanceof Refused && !signal) await askToSee();
    }
    if (!signal && !isOver) connection("Connection lost. Trying again …", true);
    await pause(1000);
  }
}
function connection(text, isLost) {
  setText($("connection"), text);
  $("connection").classList.toggle("lost", isLost);
}
function message(kind, { now: at, content }) {
  ahead = at - Date.now() / 1000;
  if (kind === "over") {
    isOver = true;
    connection("The job has ended.", false);
    $("end").disabled = true;
    for (const name of rows.keys()) paintHost(name);
    return;
  }
  if (kind === "view") {
    view = content; samples = [];
    for (const id of ["failures", "lines", "curves", "marks"]) $(id).replaceChildren();
    $("more-failures").querySelector("div").replaceChildren();
    delete $("map").dataset.painted;
  } else view = merge(view, content);
  sample(at);
  connection("Live", false);
  render(kind === "view" ? view : content);
}

// ------------------------------------------------------------------------------------------------------- the actions

function ask(title, text, action, perform) { // perform(): resolves to "" or why not
  $("ask-title").textContent = title; $("ask-text").textContent = text; $("ask-do").textContent = action;
  $("ask-error").textContent = ""; $("token").value = token;
  return new Promise((resolve) => {
    const done = () => { $("ask").close(); resolve(); };
    $("ask").querySelector("form").onsubmit = async (event) => {
      event.preventDefault();
      token = $("token").value.trim();
      const refusal = await perform().catch((error) => String(error));
      if (refusal) { $("ask-error").textContent = refusal; $("token").focus(); } else done();
    };
    $("ask-cancel").onclick = done; $("ask").oncancel = () => resolve();
    $("ask").showModal();
    (token ? $("ask-do") : $("token")).focus();
  });
}
async function act(path, body) {
  const response = await fetch(path, { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (response.status === 401) { token = ""; return "This is not the token of the job."; }
  return response.ok ? "" : response.text();
}
const askDrain = (host) => ask(`Drain host ${host}?`, "Its workers leave at the end of a tick, as after a preemption notice. Nothing is lost.", "Drain", () => act("drain", { host }));
const askToSee = () => ask("This page needs the token", "It shows this job only with its token, which elasticrun status JOB --token prints.", "Open", async () => "");
$("end").addEventListener("click", () => ask("End the job?", "All workers are stopped, as by SIGTERM to elasticrun.", "End the job", () => act("end", {})));
$("copies").addEventListener("toggle", commits);
$("map").addEventListener("keydown", move);
$("marks").addEventListener("keydown", moveMark);
$("marks").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) chooseMark(button);
});
$("map").addEventListener("click", (event) => {
  const cell = event.target.closest("[role=gridcell]");
  if (cell) { focusCell(cell); select(cell.dataset.slot); }
});
follow("events", message);
