// The laboratory of residual resampling: two distributions over eight tokens, and what comes out.

import { canvas, scale, svg } from "./draw.js";
import { accepted, distance, normalised, rejectionMass, sampleOnce, sum } from "./maths.js";

const TOKENS = 8;
const HEIGHT = 280;

export class ResidualLab {
  #container;
  #seeds = [];
  #target = [];
  #draft = [];
  #kept = [];
  #resampled = [];

  constructor(container) {
    this.#container = container;
    this.reseed();
  }

  reseed() {
    const shape = () => Array.from({ length: TOKENS }, () => -Math.log(1 - Math.random()) + 0.05);
    this.#seeds = [shape(), shape()];
  }

  shape(likeness, sharpness) {
    const [own, other] = this.#seeds;
    this.#target = normalised(own.map((weight) => weight ** sharpness));
    const foreign = normalised(other);
    this.#draft = this.#target.map((p, token) => likeness * p + (1 - likeness) * foreign[token]);
    this.#kept = new Array(TOKENS).fill(0);
    this.#resampled = new Array(TOKENS).fill(0);
  }

  sample(count) {
    for (let round = 0; round < count; round++) {
      const { token, isAccepted } = sampleOnce(this.#target, this.#draft);
      (isAccepted ? this.#kept : this.#resampled)[token] += 1;
    }
  }

  draw() {
    const drawn = sum(this.#kept) + sum(this.#resampled);
    const share = (counts) => counts.map((count) => (drawn ? count / drawn : 0));
    const [kept, resampled] = [share(this.#kept), share(this.#resampled)];
    const came = kept.map((value, token) => value + resampled[token]);
    const mass = rejectionMass(this.#target, this.#draft);
    const off = drawn ? distance(came, this.#target) : 0;
    this.#plot(kept, resampled, `Eight tokens. A draft is refused with probability ${mass.toFixed(2)}. ` +
      (drawn ? `After ${drawn} draws what came out differs from the target by ${off.toFixed(3)} in all.` : "Nothing drawn yet."));
    return { mass, drawn, kept: sum(this.#kept), distance: off };
  }

  #plot(kept, resampled, summary) {
    const { root, width } = canvas(this.#container, HEIGHT, summary);
    const top = Math.max(...this.#target, ...this.#draft, ...kept.map((value, token) => value + resampled[token]));
    const y = scale([0, top], [HEIGHT - 22, 8]);
    const both = accepted(this.#target, this.#draft);
    const pitch = width / TOKENS;
    const bar = Math.min(pitch / 4, 26);
    root.append(svg("line", { x1: 0, x2: width, y1: y(0), y2: y(0), class: "axis" }));
    for (let token = 0; token < TOKENS; token++) {
      const left = pitch * token + (pitch - 3 * bar - 4) / 2;
      const column = (slot, from, value, kind) => value > 0 && root.append(svg("rect", {
        x: left + slot * (bar + 2), width: bar, y: y(from + value), height: y(from) - y(from + value), class: `bar-${kind}`,
      }));
      column(0, 0, this.#target[token], "target");
      column(1, 0, both[token], "draft");
      column(1, both[token], this.#draft[token] - both[token], "rejected");
      column(2, 0, kept[token], "accepted");
      column(2, kept[token], resampled[token], "residual");
      root.append(svg("text", { x: pitch * (token + 0.5), y: HEIGHT - 4, "text-anchor": "middle" }, pitch > 52 ? `token ${token + 1}` : `${token + 1}`));
    }
  }
}
