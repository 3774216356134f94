// Shows the board, reads it twice a second, and keeps the curves of the last five minutes.
"use strict";
const element = (id) => document.getElementById(id);
const make = (name, text, kind) => {
  const node = document.createElement(name);
  node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const length = (seconds) => {
  if (seconds === null) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
const size = (bytes) => {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < 4; unit += 1) bytes /= 1000;
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
};
const percent = (share) => `${Math.round(100 * share)}%`;
const history = [];
const KEPT = 600;

const curve = (title, values, text) => {
  const figure = document.createElement("figure");
  figure.className = "spark";
  const caption = document.createElement("figcaption");
  caption.append(make("span", `${title} `), make("b", text(values.at(-1))), make("small", `  at most ${text(Math.max(...values))}`));
  const most = Math.max(...values) || 1;
  const points = values.map((value, place) => `${place ? "L" : "M"}${(1000 * place / Math.max(1, values.length - 1)).toFixed(1)} ${(1000 - 1000 * value / most).toFixed(1)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 1000 1000");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: ${text(values.at(-1))} now`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", points.join(""));
  svg.append(path);
  figure.append(caption, svg);
  return figure;
};

const tiles = (board) => {
  const left = board.steps === null || !board.step_time ? null : (board.steps - board.step) * board.step_time;
  const end = left === null ? "" : ` (${new Date(Date.now() + 1000 * left).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"})})`;
  const saved = board.last_checkpoint;
  return [
    ["step", board.steps === null ? `${board.step}` : `${board.step} of ${board.steps}`],
    ["step time", length(board.step_time)],
    ["samples/s", board.samples_per_second.toPrecision(4)],
    ["remaining", `${length(left)}${end}`],
    ["last checkpoint", saved === null ? "none" : `step ${saved.step}, ${length(saved.age)} ago`],
    ["restarts", `${board.restarts}`],
  ].map(([name, value]) => {
    const tile = document.createElement("div");
    tile.append(make("dt", name), make("dd", value));
    return tile;
  });
};

const row = (rank) => {
  const line = document.createElement("tr");
  const cell = (name, text, kind) => {
    const node = make("td", text, kind);
    node.dataset.name = name;
    line.append(node);
    return node;
  };
  cell("rank", rank.rank, "number");
  cell("stage", rank.stage ?? "–", "number");
  cell("state", rank.state, rank.state);
  const bar = make("i", "", "bar");
  bar.style.setProperty("--share", percent(rank.busy));
  cell("busy", percent(rank.busy)).prepend(bar);
  cell("step", rank.step, "number");
  cell("last step", rank.last_step_age === null ? "–" : `${length(rank.last_step_age)} ago`, "number");
  cell("memory", size(rank.memory), "number");
  cell("messages", rank.outgoing ? `${rank.incoming}, ${size(rank.outgoing)} to send` : rank.incoming, "number");
  cell("", rank.action);
  return line;
};

const show = (board) => {
  const stopped = board.ranks.filter((rank) => rank.state === "stopped").map((rank) => rank.rank);
  const running = board.ranks.some((rank) => rank.state === "running" || rank.state === "waiting");
  element("headline").textContent = board.steps ? `step ${board.step} of ${board.steps}` : `step ${board.step}`;
  document.title = `${percent(board.steps ? board.step / board.steps : 0)} · step ${board.step}`;
  const news = stopped.length ? `stopped: rank ${stopped.join(", ")}` : board.news || (running ? "running" : "starting");
  if (element("news").textContent !== news) element("news").textContent = news;
  element("news").className = stopped.length ? "bad" : running ? "good" : "open";
  element("bar").hidden = !board.steps;
  if (board.steps) element("bar").value = board.step / board.steps;
  element("tiles").replaceChildren(...tiles(board));
  element("slow").hidden = !board.slow.length;
  element("slow").querySelector("ul").replaceChildren(...board.slow.map((one) =>
    make("li", `rank ${one.rank}: ${one.what} takes ${one.factor.toFixed(1)} times as long`)));
  element("ranks").querySelector("tbody").replaceChildren(...board.ranks.map(row));
  const busy = board.ranks.length ? board.ranks.reduce((sum, rank) => sum + rank.busy, 0) / board.ranks.length : 0;
  history.push([board.step_time, busy]);
  if (history.length > KEPT) history.shift();
  element("charts").replaceChildren(
    curve("step time", history.map((point) => point[0]), length),
    curve("busy share, mean of ranks", history.map((point) => point[1]), percent));
};

const read = async () => {
  try {
    const answer = await fetch(`board.json${location.search}`, {signal: AbortSignal.timeout(2000)});
    if (!answer.ok) throw new Error(answer.statusText);
    show(await answer.json());
  } catch {
    element("news").textContent = "nothing is heard of the job: it has ended, or cannot be reached";
    element("news").className = "bad";
  }
  setTimeout(read, 500);
};
for (const link of document.querySelectorAll("footer a")) link.search = location.search;
show(JSON.parse(element("board").textContent));
setTimeout(read, 500);
