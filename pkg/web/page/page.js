// Shows what /events tells. Whatever others chose, such as names, is set as text, and never parsed.

const $ = (id) => document.getElementById(id);
const gpus = new Map(); // by UUID: {root, parts, rows}
let state = null;
let hour = { points: 360, step: 10, lines: {} };
let span = hour.points; // points that the curves have room for
let paused = false;

const nothing = { got: [], entitled: [], used: [] };

const GiB = 1024 ** 3;
// Rounded up: what shows as 0 is nothing.
const amount = (bytes) => (Math.ceil(bytes / GiB * 10) / 10).toFixed(1);
const part = (permille) => permille < 0 ? "not known" : (permille / 10).toFixed(permille % 10 ? 1 : 0) + "\u00a0%";
const plural = (n, one) => n + " " + one + (n === 1 ? "" : "s");

// Only what changes is written: a screen reader or a selection must not be disturbed by what stays.
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}
function fill(node, share) {
  node.style.width = 100 * Math.min(Math.max(share, 0), 1) + "%";
}

function make(template) {
  const root = $(template).content.firstElementChild.cloneNode(true);
  const parts = {};
  for (const node of root.querySelectorAll("[data-is]")) parts[node.dataset.is] = node;
  return { root, parts };
}

// curve is the path of values between 0 and top, the newest at the right end; where they are not known it has a hole.
function curve(values, top) {
  let path = "", pen = "M";
  values.forEach((v, i) => {
    if (v < 0) { pen = "M"; return; }
    const x = 360 - (values.length - 1 - i) * 360 / Math.max(span - 1, 1);
    const y = 99 - 98 * Math.min(v / top, 1);
    path += pen + x.toFixed(1) + " " + y.toFixed(1);
    // A point between two holes is a dot.
    if (pen === "M" && !(values[i + 1] >= 0)) path += "h1";
    pen = "L";
  });
  return path;
}

const minutes = () => Math.round(span * hour.step / 60) + " min";

function summary(values) {
  const known = values.filter((v) => v >= 0);
  if (known.length === 0) return "nothing known yet";
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  return "average " + part(Math.round(mean)) + ", most " + part(Math.max(...known));
}

// draw puts what was got into an svg, up to top, and a second line of values of its own.
function draw(svg, got, top, second, secondTop) {
  attribute(svg.querySelector(".first"), "d", curve(got, top));
  attribute(svg.querySelector(".second"), "d", curve(second, secondTop));
  attribute(svg, "aria-label", "GPU time in the last " + minutes() + ": " + summary(got));
}

const tone = { running: "good", starting: "warn", paused: "warn", gone: "" };

const orders = {
  created: () => 0,
  name: (a, b) => called(a).localeCompare(called(b)),
  used: (a, b) => b.used - a.used,
  limit: (a, b) => b.limit - a.limit,
  got: (a, b) => b.got - a.got,
  state: (a, b) => a.state.localeCompare(b.state),
};

const called = (v) => v.name || v.id.slice(0, 12);

function showRow(row, v, g) {
  const p = row.parts;
  say(p.name, called(v));
  say(p.id, v.name ? v.id.slice(0, 12) : "");
  say(p.state, v.state);
  say(p.by, v.unguarded ? "no guard holds it to its limit" : "");
  p.state.className = "state " + (tone[v.state] ?? "bad");
  const limit = v.native ? g.total : v.limit;
  say(p.memory, (v.used < 0 ? "not known" : amount(v.used)) + " of " + (v.native ? "the whole GPU" : amount(v.limit) + " GiB"));
  fill(p.memoryBar, v.used / limit);
  p.memoryBar.classList.toggle("full", v.used >= 0.95 * limit);
  const more = [];
  if (v.spill > 0) more.push("spilled " + amount(v.spilled) + " of " + amount(v.spill) + " GiB");
  if (v.denied > 0) more.push(plural(v.denied, "allocation") + " denied");
  say(p.more, more.join(", "));
  say(p.time, part(v.got));
  fill(p.timeBar, v.got / 1000);
  p.entitledMark.hidden = v.entitled < 0;
  p.entitledMark.style.left = Math.min(Math.max(v.entitled, 0), 1000) / 10 + "%";
  say(p.entitled, v.entitled < 0 ? "" : "entitled to " + part(v.entitled));
  say(p.share, v.native ? "all" : "weight " + v.weight + (v.percent ? ", " + v.percent + "\u00a0%" : ""));
  say(p.priority, v.native ? "" : "priority " + v.priority);
  const { got, entitled } = hour.lines[v.line] ?? nothing;
  const most = Math.max(0, ...got, ...entitled), top = [50, 100, 250, 500, 1000].find((n) => n >= most) ?? 1000;
  draw(row.root.querySelector("svg"), got, top, entitled, top);
  say(p.scale, most > 0 ? "0 to " + part(top) : "");
}

function showGPU(g) {
  if (!gpus.has(g.uuid)) gpus.set(g.uuid, { ...make("gpu"), rows: new Map() });
  const s = gpus.get(g.uuid), p = s.parts, title = "gpu-" + g.index;
  s.root.querySelector("h2").id = title;
  s.root.setAttribute("aria-labelledby", title);
  say(p.index, String(g.index));
  say(p.name, g.name);
  say(p.facts, "policy " + g.policy + ", " + g.uuid);
  say(p.memory, amount(g.used) + " of " + amount(g.total) + " GiB");
  fill(p.memoryBar, g.used / g.total);
  say(p.time, part(g.got));
  fill(p.timeBar, g.got / 1000);
  say(p.reserved, amount(g.reserved) + " GiB");
  say(p.containers, g.vgpus.length + " of " + g.slots + " places");
  const { got, used } = hour.lines[g.line] ?? nothing;
  say(p.since, minutes() + " ago");
  draw(s.root.querySelector(".chart svg"), got, 1000, used, g.total / 2 ** 20);
  say(s.root.querySelector("caption"), "Containers on GPU " + g.index);
  const none = s.root.querySelector(".none"), table = s.root.querySelector("table");
  const find = $("find").value.trim().toLowerCase();
  const list = g.vgpus.filter((v) => [v.name, v.id, v.state].some((text) => text.toLowerCase().includes(find)));
  say(none, g.vgpus.length ? "Nothing that is found is on this GPU." : "No container has a share of this GPU.");
  none.hidden = list.length > 0;
  table.hidden = list.length === 0;
  showRows(s, table.tBodies[0], list.toSorted(orders[$("sort").value]), g);
  return s.root;
}

function showRows(s, body, list, g) {
  for (const [line, row] of s.rows) {
    if (!list.some((v) => v.line === line)) {
      row.root.remove();
      s.rows.delete(line);
    }
  }
  list.forEach((v, i) => {
    if (!s.rows.has(v.line)) s.rows.set(v.line, make("row"));
    const row = s.rows.get(v.line);
    showRow(row, v, g);
    if (body.children[i] !== row.root) body.insertBefore(row.root, body.children[i] ?? null);
  });
}

function show() {
  if (!state) return;
  say($("host"), state.host);
  document.title = "cgpu: GPUs of " + state.host;
  const at = new Date(state.at);
  say($("at"), at.toLocaleTimeString());
  $("at").dateTime = state.at;
  const trouble = state.error ? "The node cannot be read: " + state.error : state.stale ? "This describes the past: " + state.stale : "";
  $("trouble").hidden = !trouble;
  say($("trouble"), trouble);
  if (state.error) return;
  const count = state.gpus.reduce((n, g) => n + g.vgpus.length, 0);
  say($("about"), [state.driver, plural(state.gpus.length, "GPU"), plural(count, "vGPU"), "cgpu " + state.version].join(", "));
  const main = $("gpus");
  for (const [uuid, s] of gpus) {
    if (!state.gpus.some((g) => g.uuid === uuid)) {
      s.root.remove();
      gpus.delete(uuid);
    }
  }
  state.gpus.forEach((g, i) => {
    const root = showGPU(g);
    if (main.children[i] !== root) main.insertBefore(root, main.children[i] ?? null);
  });
}

// news tells a screen reader who has come or gone, and no more: figures change all the time.
function news(before, now) {
  if (!before || before.error || now.error) return;
  const names = (s) => new Map(s.gpus.flatMap((g) => g.vgpus.map((v) => [v.line, called(v) + " on GPU " + g.index])));
  const a = names(before), b = names(now);
  const came = [...b].filter(([line]) => !a.has(line)), gone = [...a].filter(([line]) => !b.has(line));
  const tell = (list, what) => list.length === 0 ? [] : [list.length > 3 ? plural(list.length, "container") + " " + what : list.map(([, name]) => name + " " + what).join(", ")];
  const text = [...tell(came, "came"), ...tell(gone, "ended")].join("; ");
  if (text) say($("news"), text);
}

function live(word, kind) {
  say($("status"), word);
  document.body.className = kind;
}

function connect() {
  const source = new EventSource("events");
  source.addEventListener("state", (e) => {
    if (!paused) {
      const now = JSON.parse(e.data);
      news(state, now);
      state = now;
      show();
      live("Live", "is-live");
    }
  });
  source.addEventListener("hour", (e) => {
    if (!paused) {
      hour = JSON.parse(e.data);
      // Five minutes, a quarter of an hour, or all of it: what there is fills the curves soon.
      const most = Math.max(0, ...Object.values(hour.lines).map((l) => l.got.length));
      span = [30, 90].find((n) => n >= most) ?? hour.points;
      show();
    }
  });
  source.addEventListener("error", () => {
    live("Connection lost, trying again", "is-lost");
    if (source.readyState === EventSource.CLOSED) { // refused, so the browser does not try again
      source.close();
      setTimeout(connect, 5000);
    }
  });
}

$("find").addEventListener("input", show);
$("sort").addEventListener("change", show);
$("pause").addEventListener("click", () => {
  paused = !paused;
  attribute($("pause"), "aria-pressed", String(paused));
  live(paused ? "Paused" : "Live", paused ? "" : "is-live");
});
connect();
