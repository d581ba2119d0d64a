// Charts on canvas with hover, zoom and names to hide. Nothing here knows what a run is.
const PALETTE = ["#2f6fb3","#d1603d","#4c9a57","#8e5bb5","#c2912e","#3a9a9a","#b5477f","#6b7a2f","#5b6bd6","#8a6d5a",
  "#d4526e","#2b908f"];
const colour = number => PALETTE[number % PALETTE.length];
const tip = document.getElementById("tip");
const linked = [];                       // charts over time: they zoom together
const charts = [];

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 1) return value.toFixed(2);
  return value.toPrecision(2);
}
function make(parent, tag, text, kind) {
  const one = document.createElement(tag);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  parent.appendChild(one);
  return one;
}
// Where an axis is marked: [[value, text], ...], all with as many digits as the step between them needs.
function ticks(from, until, log, most = 6) {
  if (!(until > from)) return [];
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(until)); power++)
      for (const times of [1, 2, 5]) {
        const at = +(times * 10 ** power).toPrecision(3);
        if (at >= from * 0.999 && at <= until * 1.001) found.push(at);
      }
    const kept = found.length > 9 ? found.filter(at => Math.abs(Math.log10(at) % 1) < 1e-9) : found;
    if (kept.length > 1) return kept.map(at => [at, scaled(at, at)]);
  }
  const rough = (until - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= rough * 0.999);
  const count = Math.floor((until - Math.ceil(from / step) * step) / step + 1e-6) + 1;
  const first = Math.ceil(from / step - 1e-9);
  return Array.from({length: Math.max(count, 0)}, (_, number) => (first + number) * step)
    .map(at => [at, scaled(at, step, Math.max(Math.abs(from), Math.abs(until)))]);
}
function scaled(value, step, largest = value) {
  const [unit, name] = largest >= 1e6 ? [1e6, "M"] : largest >= 1e4 ? [1e3, "k"] : [1, ""];
  const digits = Math.min(Math.max(-Math.floor(Math.log10(step / unit) + 1e-9), 0), 8);
  return value === 0 ? "0" : (value / unit).toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits}) + name;
}

function legend(parent, series, hidden, charts) {
  const line = make(parent, "div", undefined, "legend");
  for (const one of series) {
    const item = make(line, "span");
    const key = make(item, "i");
    if (one.dashed) { key.className = "dashed"; key.style.borderColor = one.colour; } else key.style.background = one.colour;
    item.append(one.label || one.name);
    item.onclick = () => {
      hidden.has(one.name) ? hidden.delete(one.name) : hidden.add(one.name);
      item.classList.toggle("off");
      for (const chart of charts) chart.draw();
    };
  }
}

class Chart {
  // series: {name, label, colour, dashed} and what their kind takes:
  //   lines, points: points [[x, y], ...]; points also whiskers [[low, high] of x, of y] and front
  //   windows: begin, end, mean and, if they differ, least and most, one for each of equal windows
  //   columns: none; `source` has shares by name, spans, holes, lanes, begin, end
  constructor(parent, title, options) {
    Object.assign(this, {kind: "lines", height: 240, log: false, left: 62, right: 12, top: 8, bottom: 36}, options);
    this.box = make(parent, "div", undefined, "chart");
    if (title) make(this.box, "h3", title);
    this.canvas = make(this.box, "canvas");
    this.canvas.style.height = this.height + "px";
    this.hidden = this.together ? this.together.hidden : new Set();
    this.full = this.range || this.extent();
    this.view = [...this.full];
    if (!this.together && (this.series.length > 1 || this.kind === "columns")) legend(this.box, this.series, this.hidden, [this]);
    if (this.overTime) linked.push(this);
    if (this.together) this.together.charts.push(this);
    charts.push(this);
    this.listen();
  }
  extent() {
    const xs = this.series.flatMap(one => one.points.map(point => point[0])).filter(x => x !== null && (!this.log || x > 0));
    const from = Math.min(...xs), until = Math.max(...xs);
    return from === until ? [from * 0.9, until * 1.1 + 1e-9] : [from, until];
  }
  get shown() { return this.series.filter(one => !this.hidden.has(one.name)); }
  get inner() { return [this.width - this.left - this.right, this.height - this.top - this.bottom]; }
  x(value) {
    const [from, until] = this.log ? this.view.map(Math.log10) : this.view;
    const at = this.log ? Math.log10(Math.max(value, 1e-12)) : value;
    return this.left + (at - from) / (until - from) * this.inner[0];
  }
  value(x) {
    const [from, until] = this.log ? this.view.map(Math.log10) : this.view;
    const at = from + (x - this.left) / this.inner[0] * (until - from);
    return this.log ? 10 ** at : at;
  }
  y(value) { return this.height - this.bottom - (value - this.low) / (this.high - this.low) * this.inner[1]; }
  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth || 600;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    this.canvas.dataset.from = this.view[0];
    this.canvas.dataset.until = this.view[1];
    this.scale();
    this.axes();
    pen.save();
    pen.beginPath();
    pen.rect(this.left, this.top - 2, this.inner[0], this.inner[1] + 4);
    pen.clip();
    this[this.kind]();
    pen.restore();
  }
  scale() {
    if (this.kind === "columns") return;
    if (this.bounds) { [this.low, this.high] = this.bounds; return; }
    const ys = this.kind === "windows" ? this.shown.flatMap(one => this.seen(one)) :
      this.shown.flatMap(one => one.points.filter(([x, y]) => y !== null && x >= this.view[0] && x <= this.view[1])
        .flatMap(([, y]) => [y, ...(one.whiskers || [[], []])[1]]));
    const most = Math.max(...ys, 0) || 1, least = Math.min(...ys);    // what never happens has an axis, too
    this.low = this.kind === "points" && Number.isFinite(least) ? Math.max(least - (most - least || most) * 0.15, 0) : 0;
    this.high = most + (most - this.low) * 0.08;
  }
  seen(one) {                            // the most of each window in view, and nothing else
    const [first, last] = this.windowsIn(one, ...this.view);
    return (one.most || one.mean).slice(first, last);
  }
  windowsIn(one, from, until) {
    const each = (one.end - one.begin) / one.mean.length;
    const first = Math.max(Math.floor((from - one.begin) / each), 0);
    return [first, Math.min(Math.max(Math.ceil((until - one.begin) / each), first + 1), one.mean.length)];
  }
  axes() {
    const pen = this.pen, floor = this.height - this.bottom;
    pen.strokeStyle = css("--rule");
    pen.fillStyle = css("--soft");
    pen.lineWidth = 1;
    pen.textAlign = "center";
    for (const [at, text] of ticks(...this.view, this.log)) {
      const x = this.x(at);
      pen.beginPath(); pen.moveTo(x, this.top); pen.lineTo(x, floor); pen.stroke();
      pen.fillText(text, x, floor + 15);
    }
    pen.fillText(this.xlabel, (this.left + this.width) / 2, floor + 31);
    if (this.kind === "columns") return;
    pen.textAlign = "right";
    for (const [at, text] of ticks(this.low, this.high, false, this.height < 220 ? 4 : 6)) {
      const y = this.y(at);
      pen.beginPath(); pen.moveTo(this.left, y); pen.lineTo(this.width - this.right, y); pen.stroke();
      pen.fillText(this.percent ? Math.round(at * 100) + " %" : text, this.left - 6, y + 4);
    }
    if (this.ylabel) {
      pen.save();
      pen.translate(12, (this.top + floor) / 2);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "center";
      pen.fillText(this.ylabel, 0, 0);
      pen.restore();
    }
  }
  stroke(one, places) {                  // a line through [x, y] in pixels, broken at null
    const pen = this.pen;
    pen.strokeStyle = one.colour;
    pen.lineWidth = 1.6;
    pen.setLineDash(one.dashed ? [6, 4] : []);
    pen.beginPath();
    let began = false;
    for (const place of places) {
      if (place) began ? pen.lineTo(...place) : pen.moveTo(...place);
      began = place !== null;
    }
    pen.stroke();
    pen.setLineDash([]);
  }
  lines() {
    for (const one of this.shown)
      this.stroke(one, one.points.map(([at, value]) =>
        value === null || at === null || (this.log && at <= 0) ? null : [this.x(at), this.y(value)]));
  }
  windows() {                            // a column of pixels has the mean of its windows, and their least to their most
    for (const one of this.shown) {
      const places = [];
      this.pen.fillStyle = one.colour;
      for (let column = this.left; column < this.width - this.right; column++) {
        const from = this.value(column), until = this.value(column + 1);
        if (until <= one.begin || from >= one.end) { places.push(null); continue; }
        const found = this.over(one, from, until);
        places.push([column + 0.5, this.y(found.mean)]);
        if (!one.most) continue;
        this.pen.globalAlpha = 0.28;
        this.pen.fillRect(column, this.y(found.most), 1, Math.max(this.y(found.least) - this.y(found.most), 0));
        this.pen.globalAlpha = 1;
      }
      this.stroke(one, places);
    }
  }
  over(one, from, until) {
    const [first, last] = this.windowsIn(one, from, until), found = {mean: 0, least: Infinity, most: -Infinity};
    for (let place = first; place < last; place++) {
      found.mean += one.mean[place] / (last - first);
      found.least = Math.min(found.least, (one.least || one.mean)[place]);
      found.most = Math.max(found.most, (one.most || one.mean)[place]);
    }
    return found;
  }
  points() {
    const pen = this.pen;
    for (const one of this.shown)
      for (const [at, value] of one.points) {
        pen.strokeStyle = pen.fillStyle = one.colour;
        pen.lineWidth = 1.2;
        const [across, up] = one.whiskers || [[], []];
        pen.beginPath();
        if (across.length) { pen.moveTo(this.x(across[0]), this.y(value)); pen.lineTo(this.x(across[1]), this.y(value)); }
        if (up.length) { pen.moveTo(this.x(at), this.y(up[0])); pen.lineTo(this.x(at), this.y(up[1])); }
        pen.stroke();
        pen.beginPath();
        pen.arc(this.x(at), this.y(value), one.front ? 6 : 4, 0, 7);
        one.dashed ? pen.stroke() : pen.fill();
        if (one.front) { pen.strokeStyle = css("--ink"); pen.stroke(); }
      }
  }
  columns() {
    const {shares, spans, holes, lanes, begin, end} = this.source, floor = this.height - this.bottom, tall = this.inner[1];
    const count = Object.values(shares)[0].length, each = tall / lanes.length;
    if (this.singleSteps()) {
      for (const [from, until, cause] of holes) this.bar(from, until, cause, floor, tall * 0.35);
      for (const one of spans) this.bar(one[0], one[1], this.kinds[one[2]], this.top + (one[6] + 1) * each, each - (lanes.length > 1 ? 1 : 0));
      return;
    }
    for (let column = 0; column < count; column++) {
      const from = begin + (end - begin) * column / count, until = begin + (end - begin) * (column + 1) / count;
      if (until < this.view[0] || from > this.view[1]) continue;
      let at = floor;
      for (const one of this.shown) {
        const share = (shares[one.name] || [])[column] || 0;
        this.pen.fillStyle = one.colour;
        this.pen.fillRect(this.x(from), at - share * tall, Math.max(this.x(until) - this.x(from), 0.6), share * tall);
        at -= share * tall;
      }
    }
  }
  // Steps one by one only where most of them are wider than a pixel.
  singleSteps() {
    const within = this.source.spans.filter(one => one[1] > this.view[0] && one[0] < this.view[1]).length;
    return this.source.spans.length > 0 && within < this.width / 2;
  }
  bar(from, until, name, floor, tall) {
    const one = this.series.find(one => one.name === name);
    if (!one || this.hidden.has(name) || until < this.view[0] || from > this.view[1]) return;
    this.pen.fillStyle = one.colour;
    this.pen.fillRect(this.x(from), floor - tall, Math.max(this.x(until) - this.x(from), 0.5), tall);
  }
  listen() {
    let since = null;
    this.canvas.addEventListener("mousedown", event => { since = event.offsetX; event.preventDefault(); });
    this.canvas.addEventListener("mousemove", event => {
      this.draw();
      if (since !== null && Math.abs(event.offsetX - since) > 3) {
        this.pen.fillStyle = "#8884";
        this.pen.fillRect(since, this.top, event.offsetX - since, this.inner[1]);
      } else if (this.kind !== "points" && event.offsetX >= this.left && event.offsetX <= this.width - this.right) {
        this.pen.fillStyle = css("--soft");
        this.pen.fillRect(event.offsetX, this.top, 1, this.inner[1]);
      }
      this.tell(event);
    });
    window.addEventListener("mouseup", event => {
      if (since === null) return;
      const box = this.canvas.getBoundingClientRect(), ends = [since, event.clientX - box.left].sort((a, b) => a - b);
      since = null;
      if (ends[1] - ends[0] > 5) this.zoom(ends.map(x => this.value(Math.min(Math.max(x, this.left), this.width - this.right))));
    });
    this.canvas.addEventListener("dblclick", () => this.zoom([...this.full]));
    this.canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; this.draw(); });
  }
  zoom(view) {
    for (const chart of this.overTime ? linked : [this]) { chart.view = [...view]; chart.draw(); }
  }
  tell(event) {
    const at = this.value(event.offsetX);
    const told = {columns: () => this.inColumn(at), points: () => this.nearest(event), windows: () => this.inWindow(at),
      lines: () => this.above(at)}[this.kind]();
    tip.style.display = told ? "block" : "none";
    tip.textContent = told;
    tip.style.left = Math.max(Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8), 0) + "px";
    tip.style.top = Math.max(Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 8), 0) + "px";
  }
  number(value) { return this.percent ? short(value * 100) + " %" : short(value); }
  above(at) {                            // what share of each line lies below
    const rows = this.shown.map(one => {
      const place = one.points.findIndex(point => point[0] >= at);
      return place < 0 ? null : `${one.label || one.name}: ${this.number(one.points[place][1])}`;
    }).filter(Boolean);
    return rows.length ? `${short(at)} ${this.unit || ""}\n${rows.join("\n")}` : "";
  }
  inWindow(at) {
    const wide = this.value(1) - this.value(0);
    const rows = this.shown.filter(one => at >= one.begin && at <= one.end).map(one => {
      const {mean, least, most} = this.over(one, at, at + wide);
      const between = one.most && least < most ? ` (${this.number(least)} to ${this.number(most)})` : "";
      return `${one.label || one.name}: ${this.number(mean)}${between}`;
    });
    return rows.length ? `${short(at)} s\n${rows.join("\n")}` : "";
  }
  nearest(event) {
    let best = "", least = 400;
    const told = (name, value, ends) => `${name} ${short(value)}` + (ends.length ? ` (${short(ends[0])} to ${short(ends[1])})` : "");
    for (const one of this.shown)
      for (const [x, y] of one.points) {
        const far = (this.x(x) - event.offsetX) ** 2 + (this.y(y) - event.offsetY) ** 2;
        const [across, up] = one.whiskers || [[], []];
        if (far < least) [best, least] = [`${one.label || one.name}\n${told(this.xlabel, x, across)}\n${told(this.ylabel, y, up)}`, far];
      }
    return best;
  }
  inColumn(at) {
    const {shares, spans, lanes, begin, end} = this.source;
    const here = this.singleSteps() ? spans.filter(one => one[0] <= at && at < one[1]) : [];
    if (here.length) return here.map(one => (lanes.length > 1 ? `lane ${lanes[one[6]]}: ` : "") + `step ${one[3]} at ` +
      `${one[0].toFixed(4)} s, ${short((one[1] - one[0]) * 1e3)} ms\n${one[4]} prefill tokens, ${one[5]} decodes`).join("\n");
    const hole = this.singleSteps() ? this.source.holes.find(one => one[0] <= at && at < one[1]) : null;
    if (hole) return `${at.toFixed(4)} s, ${short((hole[1] - hole[0]) * 1e3)} ms\n${this.series.find(one => one.name === hole[2]).label}`;
    const count = Object.values(shares)[0].length, column = Math.floor((at - begin) / (end - begin) * count);
    if (column < 0 || column >= count) return "";
    const rows = this.series.map(one => [one, (shares[one.name] || [])[column] || 0]).filter(row => row[1] >= 0.001)
      .map(([one, share]) => `${one.label}: ${short(share * 100)} %`);
    return `${short(at)} s\n${rows.join("\n")}`;
  }
}

const redraw = () => { for (const chart of charts) chart.draw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
window.addEventListener("resize", redraw);
