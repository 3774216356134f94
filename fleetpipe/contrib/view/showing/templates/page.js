// Draws the charts, with figures under the pointer and by keyboard, zoom, smoothing, and time as the
// axis; chooses the traced step; and puts into a live page what has changed.
"use strict";
const make = (name, text, kind) => Object.assign(document.createElement(name), {textContent: text, className: kind});
const length = (seconds) => {
  if (seconds < 10) return `${Number(seconds.toPrecision(3))} s`;
  const [whole, two] = [Math.round(seconds), (n) => String(n % 60).padStart(2, "0")];
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes}:${two(whole)}` : `${Math.floor(minutes / 60)}:${two(minutes)}:${two(whole)}`;
};
const ticks = (low, high, most) => {
  const raw = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((one) => power * one >= raw * 0.999);
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9) + 0; n * step <= high + step * 1e-9; n += 1) values.push(n * step);
  return values;
};
const smoothed = (ys, window) => ys.map((y, last) => {
  const known = ys.slice(Math.max(0, last - window + 1), last + 1).filter((one) => one !== null);
  return y === null ? null : known.reduce((a, b) => a + b) / known.length;
});
// What the reader has chosen, for all charts alike; view is null where all of a run is shown.
const chosen = {view: null, smooth: 1, time: false};
let charts = [];
const redraw = () => charts.forEach((chart) => chart.draw());
const zoom = (low, high) => { chosen.view = high - low > 0 ? [low, high] : null; redraw(); };

const chart = (figure) => {
  const {marks, curves} = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area");
  const svg = area.querySelector("svg");
  const [cursor, choice, tip] = ["cursor", "choice", "tip"].map((kind) => make("div", "", kind));
  tip.setAttribute("role", "status");
  const xs = (curve) => (chosen.time ? curve.times : curve.xs);
  const whole = () => {
    const all = curves.flatMap(xs);
    const low = all.reduce((a, b) => Math.min(a, b));
    const high = all.reduce((a, b) => Math.max(a, b));
    if (chosen.time || (low > 0 && low <= 0.06 * high)) return [0, high || 1];
    return low < high ? [low, high] : [low - 1, high + 1];
  };
  const shown = () => chosen.view ?? whole();
  const inside = (x) => x >= shown()[0] && x <= shown()[1];
  let at = null;

  const range = (lines) => {
    const seen = lines.flatMap((curve) => curve.ys.filter((y, n) => y !== null && inside(xs(curve)[n])));
    const low = seen.reduce((a, b) => Math.min(a, b), seen[0] ?? 0);
    const high = seen.reduce((a, b) => Math.max(a, b), seen[0] ?? 0);
    // What differs in its last places is flat.
    const flat = high - low <= Math.max(Math.abs(low), Math.abs(high), 1e-200) * 1e-9;
    const margin = flat ? Math.abs(low) / 2 || 1 : (high - low) * 0.06;
    const zero = flat ? low > 0 : low >= 0 && low < (high - low) / 2;
    return [zero ? 0 : low - margin, high + margin];
  };
  const draw = () => {
    hide();
    const [left, right] = shown();
    const lines = curves.flatMap((curve) => {
      const window = Math.max(chosen.smooth, curve.window);
      if (window === 1 || curve.kind === "points") return [curve];
      return [{...curve, kind: "faint"}, {...curve, ys: smoothed(curve.ys, window)}];
    });
    const [low, high] = range(lines);
    const across = (x) => (1000 * (x - left) / (right - left)).toFixed(2);
    const up = (y) => (1000 * (high - y) / (high - low)).toFixed(2);
    const path = (kind, shape) => {
      const node = document.createElementNS(svg.namespaceURI, "path");
      node.setAttribute("class", kind);
      node.setAttribute("d", shape);
      svg.append(node);
    };
    svg.replaceChildren();
    area.classList.toggle("zoomed", chosen.view !== null);
    const rows = ticks(low, high, 5);
    path("grid", rows.map((y) => `M0 ${up(y)}H1000`).join(""));
    if (!chosen.time) marks.forEach((x) => path("mark", `M${across(x)} 0V1000`));
    for (const curve of lines) {
      const points = curve.ys.map((y, n) => (y === null ? null : `${across(xs(curve)[n])} ${up(y)}`));
      path(`${curve.kind} c${curve.colour}`, points.map((point, n) => (point ? `${points[n - 1] ? "L" : "M"}${point}` : "")).join(""));
      // A figure alone between gaps is a dot too.
      const dots = points.filter((point, n) => point && (curve.kind === "points" || !(points[n - 1] || points[n + 1])));
      path(`dots c${curve.colour}`, dots.map((point) => `M${point}h0`).join(""));
    }
    const label = (text, side, place) => {
      const node = make("span", text, "");
      node.style[side] = `${place / 10}%`;
      return node;
    };
    figure.querySelector(".y").replaceChildren(...rows.map((y) => label(y.toLocaleString("en", {maximumSignificantDigits: 4}), "top", up(y))));
    const columns = ticks(left, right, area.clientWidth < 350 ? 3 : 5);
    figure.querySelector(".x").replaceChildren(...columns.map((x) => label(chosen.time ? length(x) : x.toLocaleString("en"), "left", across(x))));
    figure.querySelector(".axis").textContent = chosen.time ? "elapsed time" : "step";
  };

  const hide = () => { cursor.remove(); tip.remove(); };
  const show = (x) => {
    const [left, right] = shown();
    const nearest = (values) => values.reduce((best, value, n) => (Math.abs(value - x) < Math.abs(values[best] - x) ? n : best), 0);
    const points = curves.map((curve) => {
      const n = nearest(xs(curve));
      return {name: curve.name, at: xs(curve)[n], step: curve.xs[n], time: curve.times[n], y: curve.ys[n]};
    });
    const first = points[nearest(points.map((point) => point.at))];
    at = first.at;
    const step = `step ${first.step.toLocaleString("en")}`;
    const figures = points.filter((point) => point.at === at).map(({name, y}) => `${name} ${y === null ? "no number" : Number(y.toPrecision(6))}`);
    const heading = first.time === undefined ? step : `${step}, after ${length(first.time)}`;
    tip.replaceChildren(...[heading, ...figures].map((text) => make("div", text, "")));
    area.append(cursor, tip);
    const offset = area.clientWidth * (at - left) / (right - left);
    cursor.style.left = `${offset}px`;
    const fits = offset + tip.offsetWidth + 12 < area.clientWidth;
    tip.style.left = `${fits ? offset + 8 : Math.max(0, offset - tip.offsetWidth - 8)}px`;
  };
  const under = (event) => {
    const box = area.getBoundingClientRect();
    const [left, right] = shown();
    return left + (right - left) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const steps = (direction) => {
    const all = [...new Set(curves.flatMap(xs))].filter(inside).sort((a, b) => a - b);
    if (!all.length) return;
    const next = direction > 0 ? all.find((x) => x > at) : all.findLast((x) => x < at);
    const end = all.at(direction > 0 ? -1 : 0);
    show(Math.abs(direction) > 1 ? end : next ?? end);
  };
  const scale = (factor) => {
    const [[left, right], [first, last]] = [shown(), whole()];
    const middle = Math.min(right, Math.max(left, at ?? right));
    const low = Math.max(first, middle - (middle - left) * factor);
    const high = Math.min(last, middle + (right - middle) * factor);
    zoom(...(low <= first && high >= last ? [0, 0] : [low, high]));
    show(middle);
  };

  let from = null;
  area.addEventListener("pointerdown", (event) => { from = under(event); show(from); });
  area.addEventListener("pointermove", (event) => {
    const x = under(event);
    show(x);
    if (from === null || !event.buttons) return;
    const [left, right] = shown();
    area.append(choice);
    choice.style.left = `${100 * (Math.min(from, x) - left) / (right - left)}%`;
    choice.style.width = `${100 * Math.abs(x - from) / (right - left)}%`;
  });
  const release = (event) => {
    const [x, [left, right]] = [under(event), shown()];
    choice.remove();
    if (from !== null && Math.abs(x - from) > (right - left) / 50) zoom(Math.min(from, x), Math.max(from, x));
    from = null;
  };
  area.addEventListener("pointerup", release);
  area.addEventListener("pointerleave", (event) => { if (from !== null) release(event); hide(); });
  area.addEventListener("dblclick", () => zoom(0, 0));
  area.addEventListener("focus", () => { if (area.matches(":focus-visible")) show(at ?? shown()[1]); });
  area.addEventListener("blur", hide);
  area.addEventListener("keydown", (event) => {
    const factor = {"+": 0.5, "=": 0.5, "-": 2}[event.key];
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -2, End: 2}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) steps(move);
    else if (factor) scale(factor);
    else if (event.key === "0" || event.key === "Escape") zoom(0, 0);
    else return;
    event.preventDefault();
  });
  draw();
  return {draw, figure, timed: curves.every((curve) => curve.times.length)};
};

const tools = document.querySelector(".tools");
// Takes the charts that have come onto the page, beside those that have stayed.
const begin = () => {
  charts = charts.filter((one) => one.figure.isConnected);
  const taken = new Set(charts.map((one) => one.figure));
  charts.push(...[...document.querySelectorAll("figure.chart")].filter((figure) => !taken.has(figure)).map(chart));
  if (!tools) return;
  tools.hidden = !charts.length;
  tools.querySelector("select").closest("label").hidden = !charts.every((one) => one.timed);
};
if (tools) {
  const [smooth, axis] = tools.querySelectorAll("input, select");
  smooth.addEventListener("input", () => {
    chosen.smooth = Math.round(2 ** Number(smooth.value));
    tools.querySelector("output").textContent = chosen.smooth > 1 ? `${chosen.smooth} figures` : "1: off";
    redraw();
  });
  axis.addEventListener("change", () => { chosen.time = axis.value === "time"; zoom(0, 0); });
  tools.querySelector("button").addEventListener("click", () => zoom(0, 0));
}
begin();
const traced = document.querySelector("#traced");
traced?.addEventListener("change", () => {
  document.querySelectorAll(".traced").forEach((node, number) => { node.hidden = number !== Number(traced.value); });
});

// What stands in each part of a live page; one that is being read stays as it is.
const sources = new Map();
const read = async () => {
  try {
    const answer = await fetch(location.href, {signal: AbortSignal.timeout(2000)});
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.title = fresh.title;
    for (const next of fresh.querySelectorAll("#head, section")) {
      const [node, source] = [document.getElementById(next.id), next.innerHTML];
      const isRead = node?.querySelector(".chart") && node.matches(":hover, :focus-within");
      if (isRead || sources.get(next.id) === source) continue;
      sources.set(next.id, source);
      if (node) node.replaceChildren(...next.childNodes);
      else document.querySelector("main").append(next);
    }
    begin();
  } catch {
    const words = document.querySelector("#answers dd");
    words.textContent = "! nothing is heard of the job: it has ended, or cannot be reached";
    words.className = "bad";
    sources.clear();
  }
  setTimeout(read, 500);
};
if (document.body.matches(".live")) {
  for (const link of document.querySelectorAll("footer a")) link.search = location.search;
  setTimeout(read, 500);
}
