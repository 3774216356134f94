// Shows the figures of a chart where the pointer is. Without it the page lacks nothing else.
"use strict";
for (const figure of document.querySelectorAll("figure.chart")) {
  const {span, curves} = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area");
  const cursor = document.createElement("div");
  const tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";

  const nearest = (xs, x) => {
    let low = 0;
    let high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const show = (event) => {
    const box = area.getBoundingClientRect();
    const x = span[0] + (span[1] - span[0]) * (event.clientX - box.left) / box.width;
    const found = curves.map((curve) => [curve, nearest(curve.xs, x)]);
    const distance = ([curve, place]) => Math.abs(curve.xs[place] - x);
    const step = found.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const at = step[0].xs[step[1]];
    tip.replaceChildren();
    for (const text of [`step ${at.toLocaleString("en")}`, ...found
      .filter(([curve, place]) => curve.xs[place] === at)
      .map(([curve, place]) => {
        const y = curve.ys[place];
        return `${curve.name} ${y === null ? "no number" : String(Number(y.toPrecision(6)))}`;
      })]) {
      const line = document.createElement("div");
      line.textContent = text;
      tip.append(line);
    }
    const left = box.width * (at - span[0]) / (span[1] - span[0]);
    area.append(cursor, tip);
    cursor.style.left = `${left}px`;
    const room = left + tip.offsetWidth + 12 < box.width;
    tip.style.left = `${room ? left + 8 : Math.max(0, left - tip.offsetWidth - 8)}px`;
  };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
