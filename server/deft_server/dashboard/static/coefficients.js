// An answer in FAST codes: its coefficients over time, dimension by dimension, and its actions as curves.

import { canvas, path, scale, svg } from "./draw.js";
import { dimensionNames } from "./plots.js";

const ROW = 30;
const HEAD = 18; // above the first row
const LABEL = 58; // a dimension's name
const GAP = 16; // between coefficients and curves
const CURVES = 0.36; // of the width
const ROOM_FOR_NUMBER = 24; // a narrower cell has its number in a title alone
const STRONGEST = 0.5; // of a cell's colour, so that numbers can be read on it

// `coefficients` are frequency by frequency, of all dimensions each, as `drafted`; `actions` [step][dimension].
export function drawCoefficients(container, { coefficients, drafted, actions }) {
  const dim = actions[0].length, steps = actions.length;
  const names = dimensionNames(dim);
  const { root, width } = canvas(container, HEAD + ROW * dim + 2, sentence({ coefficients, drafted, actions }));
  const right = width * (1 - CURVES) - GAP;
  const cell = (right - LABEL) / steps;
  const largest = Math.max(...coefficients.map(Math.abs), 1);
  root.append(
    svg("text", { x: LABEL, y: 11 }, "coefficients, slow to fast"),
    svg("text", { x: right + GAP, y: 11 }, `the ${steps} actions`),
  );
  names.forEach((name, index) => {
    const top = HEAD + ROW * index;
    root.append(svg("text", { x: 0, y: top + ROW / 2 + 4 }, name));
    for (let frequency = 0; frequency < steps; frequency++) {
      const at = frequency * dim + index;
      root.append(...drawCell(LABEL + cell * frequency, top, cell, coefficients[at], drafted[at], largest));
    }
    root.append(...drawCurve(actions.map((action) => action[index]), right + GAP, width - 4, top));
  });
}

export function sentence({ coefficients, drafted }) {
  return `${drafted.filter(Boolean).length} of ${coefficients.length} coefficients drafted`;
}

function drawCell(x, y, width, value, isDrafted, largest) {
  const strength = STRONGEST * Math.sqrt(Math.abs(value) / largest); // small ones are seen, too
  const said = `${value}${isDrafted ? ", of an accepted draft" : ", the model's own"}`;
  const size = { x: x + 0.5, width: Math.max(width - 1, 0.5) };
  return [
    svg("rect", { ...size, y: y + 1, height: ROW - 3, class: `cell ${value < 0 ? "negative" : "positive"}`, "fill-opacity": strength.toFixed(3) },
      svg("title", {}, said)),
    width >= ROOM_FOR_NUMBER ? svg("text", { x: x + width / 2, y: y + ROW / 2 + 3, "text-anchor": "middle", class: "number kept" }, String(value)) : "",
    isDrafted ? svg("rect", { ...size, y: y + ROW - 4, height: 3, class: "drafted" }) : "",
  ];
}

// On its own scale around zero, as in the plot of past actions.
function drawCurve(values, left, right, top) {
  const bound = Math.max(...values.map(Math.abs), 0.02);
  const x = scale([0, Math.max(values.length - 1, 1)], [left, right]);
  const y = scale([-bound, bound], [top + ROW - 5, top + 3]);
  return [
    svg("line", { x1: left, x2: right, y1: y(0), y2: y(0), class: "grid" }),
    svg("path", {
      d: path(values.map((value, step) => [x(step), y(value)])),
      fill: "none", stroke: "var(--accent)", "stroke-width": 1.6, "stroke-linejoin": "round",
    }, svg("title", {}, `within ±${bound.toPrecision(2)}`)),
    ...values.map((value, step) => svg("circle", { cx: x(step), cy: y(value), r: 1.8, fill: "var(--accent)" })),
  ];
}
