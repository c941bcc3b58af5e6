// The three live plots: action per dimension, latency by stage, accepted length.

import { canvas, element, legend, milliseconds, number, path, scale, signed, svg, ticks } from "./draw.js";

export const STAGES = ["queue", "wire", "prepare", "vision", "prefill", "draft", "verify", "judge",
  "commit", "finish"];
const ARM = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"];
const SHOWN = 60; // actions in the bar plots

export const dimensionNames = (count) =>
  count === ARM.length ? ARM : Array.from({ length: count }, (_, index) => `d${index}`);
export const stageColour = (stage) => `var(--stage-${stage})`;

// One line per dimension, each on its own scale, with the value now at the right.
export function drawActions(container, points) {
  const last = points.at(-1)?.action ?? [];
  const names = dimensionNames(last.length);
  // As high as the panel has become beside the camera, and never less than can be read.
  const panel = container.parentElement;
  container.replaceChildren();
  const heading = container.offsetTop - panel.offsetTop;
  const row = Math.max(34, (panel.clientHeight - heading - 16) / (names.length || 1));
  const summary = `Actions over the last ${points.length} steps. Now: ` +
    names.map((name, index) => `${name} ${signed(last[index])}`).join(", ");
  const { root, width } = canvas(container, Math.max(row * names.length, row), summary);
  const left = 58, right = width - 70;
  const x = scale([0, Math.max(points.length - 1, 1)], [left, right]);
  names.forEach((name, index) => {
    const values = points.map((point) => point.action[index]);
    const bound = Math.max(...values.map(Math.abs), 0.02); // what rounds to zero lies at zero
    const middle = row * index + row / 2;
    const y = scale([-bound, bound], [middle + row * 0.4, middle - row * 0.4]);
    root.append(
      svg("line", { x1: left, x2: right, y1: middle, y2: middle, class: "grid" }),
      svg("text", { x: 0, y: middle }, name),
      svg("text", { x: 0, y: middle + 12, class: "bound" }, `±${bound.toPrecision(2)}`),
      svg("path", {
        d: path(values.map((value, step) => [x(step), y(value)])),
        fill: "none", stroke: "var(--accent)", "stroke-width": 1.6, "stroke-linejoin": "round",
      }),
      svg("circle", { cx: x(values.length - 1), cy: y(values.at(-1)), r: 2.6, fill: "var(--accent)" }),
      svg("text", { x: width, y: middle + 4, "text-anchor": "end", class: "number" }, signed(values.at(-1))),
    );
  });
}

// One stacked bar per action; what no stage accounts for is left blank below the total.
export function drawLatency(container, legendBox, points) {
  const shown = points.slice(-SHOWN);
  const total = (point) => Math.max(point.total_ms, STAGES.reduce((sum, one) => sum + (point.stages[one] ?? 0), 0));
  const totals = shown.map(total);
  const summary = `Latency by stage of the last ${shown.length} actions. Last: ${milliseconds(totals.at(-1))} ms`;
  const { root, width, height } = canvas(container, 190, summary);
  // One slow answer must not flatten all others: what goes beyond is cut and capped in red.
  const usual = [...totals].sort((one, other) => one - other)[Math.floor(totals.length * 0.9)] ?? 1;
  const axis = ticks(Math.min(Math.max(...totals, 1), Math.max(usual * 1.6, 1)));
  const most = axis.at(-1);
  const y = scale([0, axis.at(-1)], [height - 6, 10]);
  drawGrid(root, width, axis, y, (value) => `${value} ms`);
  const x = bars(width, shown.length);
  shown.forEach((point, index) => {
    let from = 0;
    for (const stage of STAGES) {
      const spent = Math.min(point.stages[stage] ?? 0, most - from);
      if (spent <= 0) continue;
      root.append(svg("rect", {
        x: x(index), width: x.width, y: y(from + spent), height: Math.max(y(from) - y(from + spent), 0.3),
        fill: stageColour(stage),
      }));
      from += spent;
    }
    if (totals[index] > most) {
      root.append(svg("rect", { x: x(index), width: x.width, y: 4, height: 4, class: "over" },
        svg("title", {}, `${milliseconds(totals[index])} ms`)));
      return;
    }
    const rest = totals[index] - from;
    if (rest > 0.01) {
      root.append(svg("rect", {
        x: x(index), width: x.width, y: y(from + rest), height: y(from) - y(from + rest), fill: "var(--grid)",
      }));
    }
  });
  const used = STAGES.filter((stage) => shown.some((point) => (point.stages[stage] ?? 0) > 0));
  legend(legendBox, [...used.map((stage) => [stage, stageColour(stage)]), ["other", "var(--grid)"],
    ...(totals.some((one) => one > most) ? [["beyond the scale", "var(--bad)"]] : [])]);
}

// The server's last quarter of an hour: answers a second, and frames without one. Returns it in a line.
export function drawTimeline(container, ticks_) {
  const SPAN_S = 900, TICK_S = 5;
  const answers = ticks_.reduce((sum, [, some]) => sum + some, 0);
  const errors = ticks_.reduce((sum, [, , some]) => sum + some, 0);
  const slowest = Math.max(...ticks_.map(([, , , spent]) => spent));
  const told = `${answers} answers · ${errors} unanswered · slowest ${milliseconds(slowest)} ms`;
  const { root, width, height } = canvas(container, 84, `The last 15 minutes: ${told}`);
  const most = Math.max(...ticks_.map(([, some, lost]) => (some + lost) / TICK_S), 0.2);
  const axis = ticks(most, 2);
  const y = scale([0, axis.at(-1)], [height - 18, 6]);
  drawGrid(root, width, axis, y, (value) => `${value}/s`);
  const x = scale([SPAN_S, 0], [52, width]);
  const wide = Math.max((width - 52) * TICK_S / SPAN_S - 0.5, 1);
  for (const [age, some, lost, spent] of ticks_) {
    if (age > SPAN_S) continue;
    const from = y(some / TICK_S), to = y((some + lost) / TICK_S);
    root.append(svg("rect", { x: x(age), width: wide, y: from, height: y(0) - from, fill: "var(--accent)" },
      svg("title", {}, `${Math.round(age)} s ago: ${some} answers, ${lost} unanswered, slowest ${milliseconds(spent)} ms`)));
    if (lost) root.append(svg("rect", { x: x(age), width: Math.max(wide, 2), y: to, height: Math.max(from - to, 2), class: "over" }));
  }
  for (const minutes of [15, 10, 5]) {
    root.append(svg("text", { x: x(minutes * 60), y: height - 3 }, `${minutes} min ago`));
  }
  root.append(svg("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
  return told;
}

// Per action: drafted tokens kept in a pass that checked drafts, on average, and all its passes.
export function drawAccepted(container, legendBox, points) {
  const shown = points.slice(-SHOWN).filter((point) => point.passes);
  const average = (values) => values.reduce((sum, one) => sum + one, 0) / (values.length || 1);
  const kept = shown.map((point) => average(point.accepted));
  const passes = shown.map((point) => point.passes);
  const mean = average(shown.flatMap((point) => point.accepted));
  const summary = shown.length
    ? `Over ${shown.length} actions: ${number(mean, 2)} drafted tokens kept per checking pass; last action took ${passes.at(-1)} passes`
    : "No decode traces yet";
  const { root, width, height } = canvas(container, 190, summary);
  const axis = ticks(Math.max(...kept, ...passes, 4));
  const y = scale([0, axis.at(-1)], [height - 6, 10]);
  drawGrid(root, width, axis, y, String);
  const x = bars(width, shown.length);
  shown.forEach((_, index) => {
    root.append(svg("rect", {
      x: x(index), width: x.width, y: y(kept[index]), height: y(0) - y(kept[index]), fill: "var(--draft)", opacity: 0.75,
    }));
  });
  root.append(svg("path", {
    d: path(passes.map((value, index) => [x(index) + x.width / 2, y(value)])),
    fill: "none", stroke: "var(--target)", "stroke-width": 2, "stroke-linejoin": "round",
  }));
  legend(legendBox, [["drafted tokens kept per checking pass", "var(--draft)"], ["passes of the target", "var(--target)"]]);
  return mean;
}

// One wide bar for a single action, with a label where there is room.
export function drawOneAction(container, legendBox, point) {
  const spent = STAGES.filter((stage) => (point.stages[stage] ?? 0) > 0);
  const total = Math.max(point.total_ms, spent.reduce((sum, stage) => sum + point.stages[stage], 0));
  const { root, width } = canvas(container, 40, spent.map((one) => `${one} ${milliseconds(point.stages[one])} ms`).join(", "));
  const x = scale([0, total], [0, width]);
  let from = 0;
  for (const stage of spent) {
    const wide = x(point.stages[stage]);
    root.append(svg("rect", { x: x(from), width: wide, y: 4, height: 26, fill: stageColour(stage) },
      svg("title", {}, `${stage}: ${milliseconds(point.stages[stage])} ms`)));
    from += point.stages[stage];
  }
  legend(legendBox, spent.map((stage) => [`${stage} ${milliseconds(point.stages[stage])} ms`, stageColour(stage)]));
}

// A signed bar per dimension, for the playground's single answer.
export function actionRows(action) {
  const bound = Math.max(...action.map(Math.abs), 1e-6);
  return dimensionNames(action.length).map((name, index) => {
    const share = (action[index] / bound) * 50;
    const bar = svg("svg", { viewBox: "0 0 100 12", height: 12, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("line", { x1: 50, x2: 50, y1: 0, y2: 12, class: "axis" }),
      svg("rect", { x: Math.min(50, 50 + share), width: Math.abs(share), y: 2, height: 8, fill: "var(--accent)" }));
    return element("tr", {},
      element("th", { scope: "row" }, name),
      element("td", { class: "number" }, signed(action[index])),
      element("td", { width: "55%" }, bar));
  });
}

// Places of the bars: the newest is always at the right edge.
function bars(width, count) {
  const left = 52;
  const pitch = (width - left) / SHOWN;
  const place = (index) => left + (SHOWN - count + index) * pitch;
  place.width = Math.max(pitch - 1.5, 1);
  return place;
}

function drawGrid(root, width, axis, y, label) {
  for (const value of axis) {
    root.append(
      svg("line", { x1: 46, x2: width, y1: y(value), y2: y(value), class: value ? "grid" : "axis" }),
      svg("text", { x: 40, y: y(value) + 4, "text-anchor": "end", class: "number" }, label(value)),
    );
  }
}
