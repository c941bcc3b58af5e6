// Elements, scales and number formats. Knows nothing of sessions or decoding.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A drawing of fixed height that is as wide as its container; `summary` is what is read aloud.
export function canvas(container, height, summary) {
  const width = Math.max(container.clientWidth, 160);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": summary,
  });
  container.replaceChildren(root);
  return { root, width, height };
}

export function scale([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

export function path(points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// A rounded upper bound and the steps below it, for an axis that starts at zero.
export function ticks(maximum, wanted = 4) {
  const rough = Math.max(maximum, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const values = [];
  for (let value = 0; value < maximum + step; value += step) values.push(+value.toPrecision(6));
  return values;
}

export function number(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export function milliseconds(value) {
  if (!Number.isFinite(value)) return "–";
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
}

export function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
}

export function legend(container, entries) {
  container.replaceChildren(
    ...entries.map(([label, colour]) => element("span", { "--swatch": colour }, label)),
  );
}
