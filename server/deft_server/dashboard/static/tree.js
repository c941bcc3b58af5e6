// The draft trees of one action, pass by pass, with the accepted path drawn and relaxed tokens marked.

import { element, svg } from "./draw.js";

const STEP_X = { least: 30, most: 62 }; // between levels
const STEP_Y = { least: 7, most: 17 }; // between leaves
const HEIGHT = 400; // that leaves are moved together to keep
const LABEL = 46; // beside the last node, for its token
const TOP = 54; // room for the heading and for the target's own token above the first row
const ROOM_FOR_LABELS = 14; // leaves; in wider trees only accepted nodes are labelled

// Which tokens each pass contributed: [{ token, predicted, from, relaxed, pass }], in executed order.
export function executedTokens(trace) {
  const all = [];
  trace.passes.forEach((pass, index) => {
    pass.path.forEach((node) => all.push({ token: pass.tokens[node], from: pass.sources[node] || "draft", pass: index }));
    all.push({ token: pass.bonus, from: "target", pass: index });
  });
  return all.slice(0, trace.tokens.length).map((one, index) => ({
    ...one,
    token: trace.tokens[index],
    predicted: trace.predicted[index],
    relaxed: trace.tokens[index] !== trace.predicted[index],
  }));
}

export function drawTokens(list, trace, names) {
  list.replaceChildren(...executedTokens(trace).map((one, index) => {
    const drafted = one.from !== "target";
    const how = one.relaxed
      ? `drafted by ${one.from}, accepted for ${one.predicted}`
      : drafted ? `drafted by ${one.from}` : "the target's own";
    return element("li", {
      "data-kind": drafted ? "draft" : "target", "data-relaxed": one.relaxed, title: `pass ${one.pass + 1}: ${how}`,
    },
    `${names[index] ?? index} `, element("code", {}, String(one.token)),
    one.relaxed ? element("small", {}, ` for ${one.predicted}`) : null,
    element("span", { class: "unseen" }, `, ${how}`));
  }));
}

// A drawing per pass; they stand beside each other where there is room, and each is as wide as fits.
export function drawTree(container, trace) {
  const executed = executedTokens(trace);
  let offset = 0;
  container.replaceChildren(...trace.passes.map((pass, index) => {
    const layout = arrange(pass, container.clientWidth);
    const relaxed = new Set(pass.path.filter((_, at) => executed[offset + at]?.relaxed));
    const hasBonus = offset + pass.path.length < trace.tokens.length;
    offset += pass.path.length + 1;
    const name = pass.is_prefill ? "Prefill" : `Pass ${index + 1}`;
    const kept = `${name} · ${pass.path.length} of ${pass.tokens.length - 1} guesses kept`;
    const { width, height } = layout;
    return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": kept },
      svg("text", { x: 0, y: 12 }, pass.tokens.length > 1 ? kept : name),
      ...drawPass(pass, layout, relaxed, hasBonus));
  }));
}

function arrange(pass, room) {
  const children = pass.tokens.map(() => []);
  pass.parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const kept = new Set(pass.path);
  const cells = [];
  let leaves = 0;
  let depth = 0;
  const place = (node, level) => {
    depth = Math.max(depth, level);
    // The accepted path is drawn first among siblings, so that it runs along the top.
    const below = [...children[node]].sort((one, other) => kept.has(other) - kept.has(one));
    const rows = below.map((child) => place(child, level + 1));
    const row = rows.length ? rows[0] : leaves++;
    cells[node] = { level, row };
    return row;
  };
  place(0, 0);
  const levels = Math.max(depth, pass.path.length + 1);
  const stepX = clamp((room - LABEL) / levels, STEP_X);
  const stepY = clamp(HEIGHT / leaves, STEP_Y);
  return {
    places: cells.map(({ level, row }) => ({ x: 8 + level * stepX, y: TOP + row * stepY })),
    stepX,
    leaves,
    width: Math.max(levels * stepX + LABEL, 150),
    height: TOP + leaves * stepY + 8,
  };
}

const clamp = (value, { least, most }) => Math.min(Math.max(value, least), most);

function drawPass(pass, { places, leaves, stepX }, relaxed, hasBonus) {
  const kept = new Set(pass.path);
  const edges = pass.parents.map((parent, node) => (parent < 0 ? null : svg("path", {
    d: curve(places[parent], places[node]), class: kept.has(node) ? "edge kept" : "edge",
  })));
  // Kept edges last, so that they lie on top.
  edges.sort((one, other) => (one?.classList.contains("kept") ?? 0) - (other?.classList.contains("kept") ?? 0));
  const nodes = pass.tokens.map((token, node) => drawNode(pass, node, places[node], {
    kept: kept.has(node), relaxed: relaxed.has(node), labelled: node > 0 && (kept.has(node) || leaves <= ROOM_FOR_LABELS),
  }));
  return [...edges.filter(Boolean), ...(hasBonus ? drawBonus(pass, places, stepX) : []), ...nodes];
}

function drawNode(pass, node, { x, y }, { kept, relaxed, labelled }) {
  const kind = node === 0 ? "root" : `${kept ? "kept" : ""} ${relaxed ? "relaxed" : ""}`;
  const token = pass.tokens[node];
  const label = kept
    ? { x, y: y - 10, "text-anchor": "middle", class: `number kept ${relaxed ? "relaxed" : ""}` }
    : { x: x + 9, y: y + 4, class: "number halo" };
  const told = node === 0
    ? `root: ${token}; the target says ${pass.predictions[0]} comes next`
    : `${token}, drafted by ${pass.sources[node]}${kept ? ", accepted" : ""}${relaxed ? " (relaxed)" : ""}`;
  return svg("g", {},
    svg("circle", { cx: x, cy: y, r: kept || node === 0 ? 5.5 : 4, class: `node ${kind}` }, svg("title", {}, told)),
    labelled ? svg("text", label, `${token}${relaxed ? " ≠" : ""}`) : null);
}

function drawBonus(pass, places, stepX) {
  const from = places[pass.path.at(-1) ?? 0];
  // A step down where the next level is taken by drafts that were refused.
  const taken = places.some((one) => one.x === from.x + stepX && one.y === from.y);
  const to = { x: from.x + stepX, y: from.y - (taken ? STEP_Y.most : 0) };
  return [
    svg("path", { d: curve(from, to), class: "edge bonus" }),
    svg("rect", { x: to.x - 4.5, y: to.y - 4.5, width: 9, height: 9, rx: 2, class: "node bonus" },
      svg("title", {}, `${pass.bonus}: the target's own token`)),
    svg("text", { x: to.x + 10, y: to.y + 4, class: "number kept" }, String(pass.bonus)),
  ];
}

function curve(from, to) {
  const middle = (from.x + to.x) / 2;
  return `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
}
