// What a policy wrote before it acted: its parts with the words that changed, and what it points at in the picture.

import { element, milliseconds, svg } from "./draw.js";

const POINTED = 256; // what is pointed at is in a picture of this side, whatever the camera's is
const LABEL = 1 / 26; // of the picture's width
const MOST_CELLS = 2_000_000; // of the table that compares two parts word by word

export function showReasoning(list, aside, thought) {
  const shown = thought.rows
    ? thought.rows.map((runs, index) => [["step ", String(index + 1)], runs.map(run)])
    : thought.parts.map((part) => [[part.tag, element("small", {}, told(part))], marked(part)]);
  list.classList.toggle("rows", Boolean(thought.rows));
  list.replaceChildren(...shown.flatMap(([term, content]) => [element("dt", {}, ...term), element("dd", {}, ...content)]));
  aside.textContent = thought.error ?? `${thought.passes} ${thought.passes === 1 ? "pass" : "passes"} · ${thought.tokens} tokens`;
  aside.dataset.state = thought.error ? "bad" : "";
}

function run({ text, drafted }) {
  return drafted ? element("mark", {}, text) : text;
}

function told({ tokens, passes, ms }) {
  if (tokens === undefined) return "";
  const own = passes ? ` · ${passes} ${passes === 1 ? "pass" : "passes"} · ${milliseconds(ms)} ms` : "";
  return ` ${tokens} tokens${own}`;
}

// Words that the last frame did not have there; of a first frame none.
function marked({ text, before }) {
  if (before === null || before === text) return [text];
  return changes(before.split(/\s+/), text.split(/\s+/)).flatMap(({ isNew, words }, index) => {
    const said = words.join(" ");
    return [index ? " " : null, isNew ? element("mark", {}, said) : said];
  });
}

// The longest common subsequence of words, as runs of the new text.
export function changes(old, fresh) {
  let start = 0;
  while (start < Math.min(old.length, fresh.length) && old[start] === fresh[start]) start++;
  let end = 0;
  while (end < Math.min(old.length, fresh.length) - start && old.at(-1 - end) === fresh.at(-1 - end)) end++;
  const was = old.slice(start, old.length - end);
  const is = fresh.slice(start, fresh.length - end);
  const isNew = [...Array(start).fill(false), ...compared(was, is), ...Array(end).fill(false)];
  const runs = [];
  fresh.forEach((word, index) => {
    if (runs.length && runs.at(-1).isNew === isNew[index]) runs.at(-1).words.push(word);
    else runs.push({ isNew: isNew[index], words: [word] });
  });
  return runs;
}

function compared(was, is) {
  const wide = is.length + 1;
  if (wide * (was.length + 1) > MOST_CELLS) return is.map(() => true);
  const common = new Uint16Array(wide * (was.length + 1)); // of what is left from (row, column) on
  for (let row = was.length - 1; row >= 0; row--) {
    for (let column = is.length - 1; column >= 0; column--) {
      const at = row * wide + column;
      common[at] = was[row] === is[column] ? common[at + wide + 1] + 1 : Math.max(common[at + wide], common[at + 1]);
    }
  }
  const isNew = is.map(() => true);
  for (let row = 0, column = 0; row < was.length && column < is.length;) {
    const at = row * wide + column;
    if (was[row] === is[column]) {
      isNew[column] = false;
      row++;
      column++;
    } else if (common[at + wide] >= common[at + 1]) row++;
    else column++;
  }
  return isNew;
}

// Boxes and gripper over a picture of this size, in its own pixels, so that it lies as the picture does.
export function drawPointed(root, thought, width, height) {
  const x = (value) => (value / POINTED) * width;
  const y = (value) => (value / POINTED) * height;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.style.setProperty("--label", `${width * LABEL}px`);
  const boxes = thought.boxes.flatMap(({ name, corners: [left, top, right, bottom] }) => [
    svg("rect", {
      x: x(Math.min(left, right)), y: y(Math.min(top, bottom)),
      width: x(Math.abs(right - left)), height: y(Math.abs(bottom - top)),
    }),
    svg("text", { x: x(Math.min(left, right)) + width / 90, y: y(Math.min(top, bottom)) + width * LABEL }, name),
  ]);
  const points = thought.gripper.map(([a, b]) => `${x(a)},${y(b)}`);
  const now = thought.gripper[0];
  root.replaceChildren(...boxes,
    points.length > 1 ? svg("polyline", { points: points.join(" ") }) : "",
    now ? svg("circle", { cx: x(now[0]), cy: y(now[1]), r: width / 60 }) : "");
  const names = thought.boxes.map((one) => one.name).join(", ") || "no objects";
  root.setAttribute("aria-label", `What the policy points at: ${names}${now ? ", and the gripper" : ""}`);
}
