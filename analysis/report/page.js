// What a report shows of its runs.
const SHADES = {prefill:"#2f6fb3", mixed:"#e0913a", decode:"#5aa469", host:"#6b7280", unready:"#b9a2d6",
  upstream:"#c0392b", fill:"#e8a0a0", drain:"#aab4c2", empty:"#00000000"};
const WHY = {prefill:"prompts", mixed:"prompts and decodes", decode:"decodes", host:"idle: the host planned and launched",
  unready:"idle: nothing was ready to be decided", upstream:"idle: the stage before was not done",
  fill:"idle: before the stage's first work", drain:"idle: after the stage's last work", empty:"nobody in the system"};
const LESS = /_ms$|preemptions|wasted|bubble/, MORE = /throughput|hit_rate/, SHARES = /kv_usage|hit_rate|bubble/;
const DATA = JSON.parse(document.getElementById("data").textContent);
const runs = DATA.runs, alone = runs.length === 1, first = runs[0];
// A run and its simulation have one colour; of both kinds together, simulated ones are dashed.
const look = (run, number) => ({name: String(number), label: run.name, colour: colour(DATA.colours[number]), dashed: DATA.dashed[number]});
const figure = (key, value) => SHARES.test(key) && value !== null ? short(value * 100) + " %" : short(value);
const section = (title, about) => {
  const place = make(document.getElementById("page"), "section");
  make(place, "h2", title);
  if (about) make(place, "p", about);
  return place;
};

function findings() {
  const serious = runs.flatMap(run => run.findings.filter(one => !one.note).map(one => [run, one]));
  if (!serious.length) return;
  const box = make(document.getElementById("findings"), "div", undefined, "findings"), byCode = new Map();
  for (const [run, one] of serious) byCode.set(one.code, [...(byCode.get(one.code) || []), [run, one]]);
  for (const [code, members] of byCode) {
    const line = make(box, "p"), [run, one] = members[0];
    make(line, "b", code);
    const who = alone ? "" : members.length === runs.length ? ` in all ${runs.length} runs` : ` in ${members.length} of ${runs.length} runs`;
    line.append(`${who}, touches ${one.touches}: ${alone ? "" : run.name + ": "}${one.text} (${one.advice})`);
    line.title = members.map(([run]) => run.name).join("\n");
  }
}

function figures() {
  const place = section("Figures", alone ? "In brackets: 95 % intervals (block bootstrap); percentiles of too few requests have none." :
    "Best of each column in bold; hover for 95 % intervals of means; click a name to sort by it.");
  const table = make(make(place, "div", undefined, "scroll"), "table");
  table.id = "summary";
  const head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  alone ? oneRun(head, body) : manyRuns(head, body);
}
function oneRun(head, body) {
  const statistics = ["mean", "p50", "p90", "p99"], {summary, intervals} = first;
  for (const name of ["", "mean", "P50", "P90", "P99", "", ""]) make(head, "th", name);
  const others = DATA.columns.filter(key => !/_ms$/.test(key)), rows = ["ttft", "tpot", "itl", "e2el"];
  for (let place = 0; place < Math.max(rows.length, Math.ceil(others.length / 2)); place++) {
    const row = make(body, "tr");
    make(row, "td", rows[place] ? rows[place].toUpperCase() + " (ms)" : "");
    for (const name of statistics) {
      const key = `${name}_${rows[place]}_ms`, cell = make(row, "td", rows[place] ? short(summary[key]) : "");
      if (intervals[key]) make(cell, "small", ` [${intervals[key].map(short).join(", ")}]`);
    }
    for (const key of others.slice(place * 2, place * 2 + 2)) {
      make(row, "td", DATA.names[key], "name");
      make(row, "td", figure(key, summary[key]));
    }
  }
}
function manyRuns(head, body) {
  const best = {};
  for (const key of DATA.columns) {
    const values = runs.map(run => run.summary[key]).filter(value => value !== null);
    if (values.length && new Set(values).size > 1)
      best[key] = LESS.test(key) ? Math.min(...values) : MORE.test(key) ? Math.max(...values) : undefined;
  }
  const rows = runs.map((run, number) => {
    const row = make(body, "tr"), name = make(row, "td"), key = make(name, "i");
    key.style.background = colour(DATA.colours[number]);
    name.append(run.name);
    for (const key of DATA.columns) {
      const cell = make(row, "td", figure(key, run.summary[key]), run.summary[key] === best[key] && best[key] !== undefined ? "best" : "");
      if (run.intervals[key]) cell.title = `95 %: ${run.intervals[key].map(short).join(" to ")}`;
    }
    return [run, row];
  });
  let by = null, sign = 1;
  const sort = key => {
    sign = by === key ? -sign : 1;
    by = key;
    const value = run => key === null ? run.name : run.summary[key] ?? Infinity;
    rows.sort(([a], [b]) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    for (const [, row] of rows) body.append(row);
  };
  make(head, "th", "run").onclick = () => sort(null);
  for (const key of DATA.columns) make(head, "th", DATA.names[key]).onclick = () => sort(key);
}

function twins() {
  if (!DATA.twins.length) return;
  const place = section("Simulation over hardware", "Simulated over measured, less one, of runs that differ in nothing but where they ran. " +
    "Distributions and time lines of both lie over each other below (simulated: dashed).");
  const table = make(make(place, "div", undefined, "scroll"), "table"), head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  table.id = "twins";
  make(head, "th", "measured");
  make(head, "th", "simulated", "text");
  for (const key of Object.keys(DATA.twins[0].errors)) make(head, "th", DATA.names[key]);
  for (const {hardware, simulated, errors} of DATA.twins) {
    const row = make(body, "tr");
    make(row, "td", runs[hardware].name);
    make(row, "td", runs[simulated].name, "text");
    for (const [key, error] of Object.entries(errors)) {
      const cell = make(row, "td", error === null ? "-" : (error >= 0 ? "+" : "\u2212") + (Math.abs(error) * 100).toFixed(1) + " %");
      cell.title = `${figure(key, runs[hardware].summary[key])} measured, ${figure(key, runs[simulated].summary[key])} simulated`;
    }
  }
}

function pareto() {
  if (!DATA.pareto) return;
  const place = section("TTFT against TPOT", "Each run's means with their 95 % intervals; ringed are those that no other run beats in both.");
  new Chart(place, "", {kind: "points", height: 340, xlabel: "mean TTFT (ms)", ylabel: "mean TPOT (ms)", log: DATA.pareto.log,
    series: DATA.pareto.points.map(one => ({...look(runs[one.run], one.run), points: [[one.ttft, one.tpot]], front: one.front,
      whiskers: ["ttft", "tpot"].map(name => runs[one.run].intervals[`mean_${name}_ms`] || [])})), range: DATA.pareto.range});
}

function distributions(together) {
  const place = section("Latencies", "Share of requests (ITL: of gaps between tokens) that took no longer. Drag to zoom, double click " +
    "to see all, click a name to hide it.");
  if (!alone) legend(place, runs.map(look), together.hidden, together.charts);
  const grid = make(place, "div", undefined, "grid");
  for (const [name, title] of [["ttft", "TTFT"], ["tpot", "TPOT"], ["itl", "ITL"], ["e2el", "E2EL"]]) {
    const series = runs.map((run, number) => ({...look(run, number), points: run.cdfs[name] || []})).filter(one => one.points.length);
    if (!series.length) continue;
    const most = Math.max(...series.map(one => one.points[one.points.length - 1][0]));
    const log = most > 20 * Math.min(...series.map(one => one.points[Math.floor(one.points.length / 2)][0]));
    new Chart(grid, title, {series, together, xlabel: `${title} (ms)`, unit: "ms", log, percent: true, bounds: [0, 1.02]});
  }
}

// Charts over time: a title, options, and what they show of a run: [name of the line, label, colour].
const OF_ONE = [
  ["Tokens of a step", {}, ["prefill", "prefill", 0], ["decode", "decode", 2]],
  ["Tokens a second", {}, ["prefill_rate", "prefill", 0], ["decode_rate", "decode", 2]],
  ["Requests", {}, ["running", "running", 0], ["waiting", "waiting", 1]],
  ["KV blocks in use", {percent: true, bounds: [0, 1.02]}, ["kv", "in use", 3]],
  ["Preemptions a window", {}, ["preemptions", "preemptions", 1]],
  ["Milliseconds of a step", {}, ["ms", "ms", 5]],
];
const OF_MANY = [
  ["Requests waiting", {}, "waiting"], ["Requests running", {}, "running"], ["KV blocks in use", {percent: true, bounds: [0, 1.02]}, "kv"],
  ["Preemptions a window", {}, "preemptions"], ["Prefill tokens of a step", {}, "prefill"], ["Decodes of a step", {}, "decode"],
];
function overTime(together) {
  const drawn = runs.filter(run => run.lines.begin !== undefined);
  if (!drawn.length) return;
  const each = drawn[0].lines.waiting.mean.length;
  const place = section("Over time", `${each.toLocaleString("en-US")} windows of ${short((drawn[0].lines.end - drawn[0].lines.begin) / each)} s` +
    `${alone ? "" : " (of the first run)"}: the line is the mean, around it from the least to the most` +
    `${DATA.groups > 1 ? " of any replica; requests and tokens a second are of all" : ""}. Charts zoom together.`);
  const grid = make(place, "div", undefined, "grid"), range = [DATA.span[0], DATA.span[1]];
  const options = {kind: "windows", overTime: true, xlabel: "time (s)", range, height: 200};
  const windows = (run, name) => ({begin: run.lines.begin, end: run.lines.end, ...run.lines[name]});
  if (alone) for (const [title, more, ...lines] of OF_ONE)
    new Chart(grid, title, {...options, ...more, series: lines.map(([name, label, number]) => ({name, label, colour: colour(number), ...windows(first, name)}))});
  else for (const [title, more, name] of OF_MANY)
    new Chart(grid, title, {...options, ...more, together, series: runs.map((run, number) => ({...look(run, number), run}))
      .filter(one => one.run.lines.begin !== undefined).map(one => ({...one, ...windows(one.run, name)}))});
}

function stages() {
  if (!first.stages.length) return;
  const place = section("Stages", first.stages[0].spans.length ? "Shares of time; zoom in for single steps (low bars: idle, by cause)." :
    "Shares of time at work, and idle by cause. Single steps: python -m analysis perfetto.");
  for (const source of first.stages) {
    const names = Object.keys(SHADES).filter(name => (source.shares[name] || []).some(share => share > 0));
    const title = (DATA.groups > 1 ? `replica ${source.group}, ` : "") + `stage ${source.stage}`;
    new Chart(place, title, {kind: "columns", height: 120, overTime: true, xlabel: "time (s)", source, range: [DATA.span[0], DATA.span[1]],
      kinds: ["prefill", "mixed", "decode"], series: names.map(name => ({name, label: WHY[name], colour: SHADES[name]}))});
  }
}

document.title = DATA.title;
document.getElementById("title").textContent = DATA.title;
document.getElementById("about").textContent = DATA.about;
document.getElementById("made").textContent = DATA.made;
const together = {hidden: new Set(), charts: []};
findings();
figures();
twins();
pareto();
distributions(together);
overTime(together);
stages();
redraw();                                // once the page is as wide as it will be
