// Charts: figures under the pointer and by keyboard, zoom, smoothing, time as the axis. Timelines:
// the chosen step, and boxes by keyboard. Without it the page shows whole curves and the last step.
"use strict";
const make = (name, text, kind) => {
  const node = document.createElement(name);
  node.textContent = text;
  node.className = kind;
  return node;
};
const length = (seconds) => {
  if (seconds < 10) return `${Number(seconds.toPrecision(3))} s`;
  const [whole, two] = [Math.round(seconds), (n) => String(n % 60).padStart(2, "0")];
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes}:${two(whole)}` : `${Math.floor(minutes / 60)}:${two(minutes)}:${two(whole)}`;
};
const written = (y) => (y === null ? "no number" : String(Number(y.toPrecision(6))));
const ticks = (low, high, most) => {
  const raw = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((one) => power * one >= raw * 0.999);
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) values.push(n * step);
  return values;
};
// What the reader has chosen, for all charts alike; view is null where all of a run is shown.
const chosen = {view: null, smooth: 1, time: false};
const charts = [];
const redraw = () => charts.forEach((chart) => chart.draw());
const zoom = (low, high) => { chosen.view = high - low > 0 ? [low, high] : null; redraw(); };

const smoothed = (ys, window) => {
  let total = 0;
  let count = 0;
  return ys.map((y, place) => {
    if (y !== null) { total += y; count += 1; }
    const gone = place >= window ? ys[place - window] : null;
    if (gone !== null) { total -= gone; count -= 1; }
    return y === null || !count ? null : total / count;
  });
};

const chart = (figure) => {
  const {span, marks, curves} = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area");
  const svg = area.querySelector("svg");
  const cursor = make("div", "", "cursor");
  const choice = make("div", "", "choice");
  const tip = make("div", "", "tip");
  tip.setAttribute("role", "status");
  const timed = curves.every((curve) => curve.times.length);
  const xs = (curve) => (chosen.time ? curve.times : curve.xs);
  const whole = () => {
    if (!chosen.time) return span;
    const ends = curves.map((curve) => [curve.times[0], curve.times.at(-1)]);
    const last = Math.max(...ends.map((end) => end[1]));
    return [0, last || 1];
  };
  const shown = () => chosen.view ?? whole();
  let at = null;

  const draw = () => {
    hide();
    const [left, right] = shown();
    const lines = curves.flatMap((curve, place) => {
      // The mean that came with the page makes way for the reader's.
      if (chosen.smooth > 1 && curves[place - 1]?.kind === "faint") return [];
      if (chosen.smooth === 1 || curve.kind === "points") return [{...curve}];
      return [{...curve, kind: "faint"}, {...curve, kind: "line", ys: smoothed(curve.ys, chosen.smooth)}];
    });
    const seen = lines.flatMap((curve) => curve.ys.filter((y, place) => y !== null && xs(curve)[place] >= left && xs(curve)[place] <= right));
    let low = seen.reduce((a, b) => Math.min(a, b), seen[0] ?? 0);
    let high = seen.reduce((a, b) => Math.max(a, b), seen[0] ?? 0);
    // As in the page's own drawing: what differs in its last places is flat.
    const flat = high - low <= Math.max(Math.abs(low), Math.abs(high), 1e-200) * 1e-9;
    const margin = flat ? Math.abs(low) / 2 || 1 : (high - low) * 0.06;
    low = (flat ? low > 0 : low >= 0 && low < (high - low) / 2) ? 0 : low - margin;
    high += margin;
    const across = (x) => 1000 * (x - left) / (right - left);
    const up = (y) => 1000 * (high - y) / (high - low);
    const path = (kind, shape) => {
      const node = document.createElementNS(svg.namespaceURI, "path");
      node.setAttribute("class", kind);
      node.setAttribute("d", shape);
      svg.append(node);
    };
    svg.replaceChildren();
    area.classList.toggle("zoomed", chosen.view !== null);
    const rows = ticks(low, high, 5);
    path("grid", rows.map((y) => `M0 ${up(y).toFixed(2)}H1000`).join(""));
    if (!chosen.time) marks.forEach((x) => path("mark", `M${across(x).toFixed(2)} 0V1000`));
    for (const curve of lines) {
      let pen = "M";
      const points = curve.ys.map((y, place) => {
        const point = y === null ? "" : `${pen}${across(xs(curve)[place]).toFixed(2)} ${up(y).toFixed(2)}`;
        pen = y === null ? "M" : "L";
        return point;
      });
      path(`${curve.kind} c${curve.colour}`, points.join(""));
      if (curve.kind === "points") path(`dots c${curve.colour}`, points.map((point) => (point ? `M${point.slice(1)}h0` : "")).join(""));
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
    const near = (curve) => xs(curve).reduce((best, value, place) => (Math.abs(value - x) < Math.abs(xs(curve)[best] - x) ? place : best), 0);
    const places = curves.map(near);
    const distance = (place) => Math.abs(xs(curves[place])[places[place]] - x);
    const first = places.reduce((best, _, place) => (distance(place) < distance(best) ? place : best), 0);
    at = xs(curves[first])[places[first]];
    const seconds = curves[first].times[places[first]];
    const step = `step ${curves[first].xs[places[first]].toLocaleString("en")}`;
    const lines = curves.flatMap((curve, place) => (xs(curve)[places[place]] === at ? [`${curve.name} ${written(curve.ys[places[place]])}`] : []));
    tip.replaceChildren(...[seconds === undefined ? step : `${step}, after ${length(seconds)}`, ...lines].map((text) => make("div", text, "")));
    const width = area.clientWidth;
    const offset = width * (at - left) / (right - left);
    area.append(cursor, tip);
    cursor.style.left = `${offset}px`;
    const fits = offset + tip.offsetWidth + 12 < width;
    tip.style.left = `${fits ? offset + 8 : Math.max(0, offset - tip.offsetWidth - 8)}px`;
  };
  const under = (event) => {
    const box = area.getBoundingClientRect();
    const [left, right] = shown();
    return left + (right - left) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const steps = (direction) => {
    const [left, right] = shown();
    const all = [...new Set(curves.flatMap(xs))].filter((x) => x >= left && x <= right).sort((a, b) => a - b);
    if (!all.length) return;
    const next = direction > 0 ? all.find((x) => x > at) : all.findLast((x) => x < at);
    show(Math.abs(direction) > 1 ? all.at(direction > 0 ? -1 : 0) : next ?? all.at(direction > 0 ? -1 : 0));
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
    const x = under(event);
    const [left, right] = shown();
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
    const scale = {"+": 0.5, "=": 0.5, "-": 2}[event.key];
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -2, End: 2}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) steps(move);
    else if (scale) {
      const [left, right] = shown();
      const [first, last] = whole();
      const middle = Math.min(right, Math.max(left, at ?? right));
      const low = Math.max(first, middle - (middle - left) * scale);
      const high = Math.min(last, middle + (right - middle) * scale);
      zoom(...(scale > 1 && low <= first && high >= last ? [0, 0] : [low, high]));
      show(middle);
    } else if (event.key === "0" || event.key === "Escape") zoom(0, 0);
    else return;
    event.preventDefault();
  });
  charts.push({draw});
  return timed;
};

// Takes the charts that are on the page, once more where others have come in their place.
const begin = () => {
  charts.length = 0;
  const timed = [...document.querySelectorAll("figure.chart")].map(chart);
  if (chosen.view || chosen.smooth > 1 || chosen.time) redraw();
  return timed;
};
const timed = begin();
if (document.querySelector(".tools")) {
  const tools = document.querySelector(".tools");
  tools.hidden = false;
  const [smooth, axis] = tools.querySelectorAll("input, select");
  smooth.addEventListener("input", () => {
    chosen.smooth = Math.round(2 ** Number(smooth.value));
    tools.querySelector("output").textContent = chosen.smooth > 1 ? `${chosen.smooth} figures` : "1: off";
    redraw();
  });
  axis.closest("label").hidden = !timed.every(Boolean);
  axis.addEventListener("change", () => { chosen.time = axis.value === "time"; zoom(0, 0); });
  tools.querySelector("button").addEventListener("click", () => zoom(0, 0));
}

const hints = new ResizeObserver((seen) => seen.forEach(({target}) => {
  target.previousElementSibling.hidden = target.scrollWidth <= target.clientWidth;
}));
document.querySelectorAll(".timelines .scroll").forEach((node) => hints.observe(node));
const traced = document.querySelector("#traced");
traced?.addEventListener("change", () => {
  document.querySelectorAll(".traced").forEach((node, place) => { node.hidden = place !== Number(traced.value); });
});
for (const canvas of document.querySelectorAll(".canvas")) {
  const boxes = [...canvas.querySelectorAll("path")].filter((path) => path.querySelector("title"));
  const tip = make("div", "", "tip");
  tip.setAttribute("role", "status");
  let place = -1;
  if (boxes.length) canvas.tabIndex = 0;
  const clear = () => { tip.remove(); boxes[place]?.classList.remove("chosen"); };
  canvas.addEventListener("blur", clear);
  canvas.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    clear();
    place = Math.min(boxes.length - 1, Math.max(0, place + move));
    boxes[place].classList.add("chosen");
    tip.textContent = boxes[place].textContent;
    canvas.append(tip);
    const box = boxes[place].getBoundingClientRect();
    tip.style.left = `${Math.min(box.left - canvas.getBoundingClientRect().left, canvas.clientWidth - tip.offsetWidth)}px`;
    tip.scrollIntoView({block: "nearest", inline: "nearest"});
  });
}
