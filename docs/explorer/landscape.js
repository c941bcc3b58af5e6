// The landscape of the speed-up over acceptance and draft length, with a point on it.

import { legend } from "./draw.js";
import { bestLength, costPerPass, passesPerAction, speedup, tokensPerPass } from "./maths.js";

const LONGEST = 16;
const COLUMNS = 120;
const ACTION_TOKENS = 7;
const STEPS = [0.5, 0.75, 1, 1.5, 2, 3, 5, 8];
// Below 1 the scale runs to red, above it to blue; 1 itself is neutral.
const COLOURS = {
  light: ["#b8474b", "#dda3a0", "#f1f0ec", "#cfdcf4", "#9fbaea", "#6a92dc", "#3a67c4", "#1d3f8a"],
  dark: ["#a84a4e", "#6b3a3d", "#24282f", "#27354f", "#33508a", "#4871c2", "#76a0f2", "#bcd3ff"],
};

export class Landscape {
  onPick = () => {};
  #heat;

  constructor(heat, ramp, ramped) {
    this.#heat = heat;
    this.ramp = ramp;
    this.ramped = ramped;
    heat.addEventListener("pointerdown", (event) => {
      heat.setPointerCapture(event.pointerId);
      this.#pick(event);
    });
    heat.addEventListener("pointermove", (event) => event.buttons && this.#pick(event));
    heat.addEventListener("keydown", (event) => this.#nudge(event));
  }

  draw(point) {
    this.#point = point;
    const { alpha, length, cost } = point;
    const told = {
      tokens: tokensPerPass(alpha, length), cost: costPerPass(length, cost), speedup: speedup(alpha, length, cost),
      best: bestLength(alpha, cost, LONGEST), passes: passesPerAction(alpha, length, ACTION_TOKENS),
    };
    this.#paint(cost);
    this.#heat.setAttribute("aria-label",
      `Speed-up over acceptance and draft length; arrow keys move the point. At acceptance ${alpha.toFixed(2)} and ${length} drafted tokens: ${told.speedup.toFixed(2)} times`);
    return told;
  }

  #point = { alpha: 0, length: 1, cost: 0 };

  #paint(cost) {
    const theme = document.documentElement.dataset.theme === "dark" ? "dark" : "light";
    const colours = COLOURS[theme];
    const box = this.#heat.getBoundingClientRect();
    const density = devicePixelRatio || 1;
    this.#heat.width = Math.round(box.width * density);
    this.#heat.height = Math.round(box.height * density);
    const context = this.#heat.getContext("2d");
    context.scale(density, density);
    const [wide, high] = [box.width / COLUMNS, box.height / LONGEST];
    for (let column = 0; column < COLUMNS; column++) {
      for (let length = 1; length <= LONGEST; length++) {
        context.fillStyle = colour(colours, speedup((column + 0.5) / COLUMNS, length, cost));
        context.fillRect(column * wide, box.height - length * high, wide + 1, high + 1);
      }
    }
    const place = ({ alpha, length }) => [alpha * box.width, box.height - (length - 0.5) * high];
    mark(context, place(this.#point), "#ffffff", "#16181d");
    this.ramp.style.background = `linear-gradient(90deg, ${colours.join(", ")})`;
    legend(this.ramped, [
      ...STEPS.filter((_, index) => index % 2 === 0).map((step, index) => [`${step}×`, colours[index * 2]]),
      ["chosen point", "#ffffff"],
    ]);
  }

  #pick({ clientX, clientY }) {
    const box = this.#heat.getBoundingClientRect();
    const share = (at, from, span) => Math.min(1, Math.max(0, (at - from) / span));
    const alpha = Math.round(share(clientX, box.left, box.width) * 100) / 100;
    const length = Math.min(LONGEST, Math.floor((1 - share(clientY, box.top, box.height)) * LONGEST) + 1);
    this.onPick({ alpha, length });
  }

  #nudge(event) {
    const step = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { alpha, length } = this.#point;
    this.onPick({
      alpha: Math.min(1, Math.max(0, Math.round((alpha + step[0]) * 100) / 100)),
      length: Math.min(LONGEST, Math.max(1, length + step[1])),
    });
  }
}

function colour(colours, value) {
  const at = STEPS.findIndex((step) => step >= value);
  if (at === 0) return colours[0];
  if (at < 0) return colours.at(-1);
  const share = (Math.log(value) - Math.log(STEPS[at - 1])) / (Math.log(STEPS[at]) - Math.log(STEPS[at - 1]));
  return mix(colours[at - 1], colours[at], share);
}

function mix(one, other, share) {
  const channel = (hex, index) => parseInt(hex.slice(1 + 2 * index, 3 + 2 * index), 16);
  const parts = [0, 1, 2].map((index) => Math.round(channel(one, index) * (1 - share) + channel(other, index) * share));
  return `rgb(${parts.join(" ")})`;
}

function mark(context, [x, y], inside, outside) {
  context.beginPath();
  context.arc(x, y, 6, 0, 2 * Math.PI);
  context.fillStyle = inside;
  context.fill();
  context.lineWidth = 2.5;
  context.strokeStyle = outside;
  context.stroke();
}
