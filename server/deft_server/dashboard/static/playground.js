// The playground: one picture and one instruction through /v1/act, with everything the server tells.

import { ask } from "./access.js";
import { drawCoefficients } from "./coefficients.js";
import { element, milliseconds, number } from "./draw.js";
import { describe } from "./live.js";
import { STAGES, actionRows, dimensionNames, drawOneAction } from "./plots.js";
import { drawTokens, drawTree } from "./tree.js";

const byId = (id) => document.getElementById(id);
const TYPES = ["image/png", "image/jpeg"];
const PLAIN = "autoregressive";

export class Playground {
  #picture = null;
  #runs = [];
  #session = `playground-${Math.random().toString(36).slice(2)}`;
  #isOpen = false;

  constructor() {
    byId("file").addEventListener("change", ({ target }) => this.#take(target.files[0]));
    const drop = byId("drop");
    for (const name of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(name, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", name === "dragover");
        if (name === "drop") this.#take(event.dataTransfer.files[0]);
      });
    }
    addEventListener("paste", ({ clipboardData }) => {
      if (!byId("playground").hidden && clipboardData?.files.length) this.#take(clipboardData.files[0]);
    });
    byId("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#act();
    });
  }

  async open() {
    if (this.#isOpen || byId("playground").hidden) return;
    try {
      const info = await ask("/v1/info");
      this.#isOpen = true;
      fillSelect(byId("try-decoding"), info.decoding_methods, info.decoding);
      fillSelect(byId("try-statistics"), info.statistics_keys, info.default_statistics_key);
      this.#offer(info.instructions);
      this.#say("");
      await this.#takeExample();
      if (this.#picture && !this.#runs.length) await this.#act(); // so that there is something to see
    } catch (error) {
      if (error.status === 401 || error.status === 403) byId("key-form").hidden = false;
      this.#say(error.message, "bad");
    }
  }

  // What the policy was trained on can be chosen, and stands there where the example names none of it.
  #offer(instructions) {
    const box = byId("try-instruction");
    byId("try-instructions").replaceChildren(...instructions.map((one) => element("option", { value: one })));
    if (box.value === box.defaultValue) box.value = exampleInstruction(instructions);
  }

  // The first frame of a trial of the task that the instruction names, so that one click shows something.
  async #takeExample() {
    const response = await fetch("/dashboard/static/example.png");
    if (!response.ok || this.#picture) return;
    this.#take(new File([await response.blob()], "example.png", { type: "image/png" }));
    byId("drop-text").textContent = "An example; choose, drop or paste your own";
  }

  #take(file) {
    if (!file) return;
    if (!TYPES.includes(file.type)) {
      this.#say(`${file.name}: a PNG or JPEG is needed, this is ${file.type || "of unknown type"}`, "bad");
      return;
    }
    this.#picture = file;
    const preview = byId("preview");
    URL.revokeObjectURL(preview.src);
    preview.src = URL.createObjectURL(file);
    preview.hidden = false;
    byId("drop-text").textContent = file.name;
    this.#say("");
  }

  async #act() {
    if (!this.#picture) {
      this.#say("Choose a picture first.", "bad");
      byId("file").focus();
      return;
    }
    const asked = {
      instruction: byId("try-instruction").value,
      decoding: byId("try-decoding").value,
      radius: byId("try-radius").value,
      statistics_key: byId("try-statistics").value,
    };
    byId("try-send").disabled = true;
    this.#say("asking …");
    try {
      for (const decoding of this.#methods(asked)) await this.#ask({ ...asked, decoding });
      this.#say("");
    } catch (error) {
      this.#say(error.message, "bad");
    } finally {
      byId("try-send").disabled = false;
    }
  }

  // Plain decoding first, once for a frame: there is something to compare with, and to draft from.
  #methods({ instruction, decoding }) {
    const isKnown = [...byId("try-decoding").options].some((one) => one.value === PLAIN);
    const wasAsked = this.#runs.some((run) => run.picture === this.#picture && run.asked.instruction === instruction);
    return isKnown && !wasAsked && decoding !== PLAIN ? [PLAIN, decoding] : [decoding];
  }

  async #ask(asked) {
    const form = new FormData();
    form.set("image", this.#picture);
    for (const [name, value] of Object.entries(asked)) if (value !== "") form.set(name, value);
    for (const wanted of ["trace", "reasoning"]) form.set(wanted, "true");
    form.set("session_id", this.#session); // what was answered before is what the next is drafted from
    const started = performance.now();
    const answer = await ask("/v1/act", { method: "POST", body: form });
    this.#show(answer, asked, performance.now() - started);
  }

  #show(answer, asked, roundTripMs) {
    const { timings, trace } = answer;
    const action = answer.actions[0];
    const point = {
      total_ms: timings.total_ms ?? 0,
      stages: Object.fromEntries(STAGES.map((stage) => [stage, timings[`${stage}_ms`] ?? 0])),
    };
    byId("try-answer").hidden = false;
    byId("try-summary").textContent = `${milliseconds(point.total_ms)} ms on the server, ${milliseconds(roundTripMs)} ms in all`;
    byId("try-action").replaceChildren(...actionRows(action));
    drawOneAction(byId("try-timing"), byId("try-timing-legend"), point);
    const isDrawn = trace && !answer.reasoning; // of a text there are hundreds of nodes
    const isFast = Boolean(trace?.fast); // its text is made of names that say nothing
    byId("try-fast").hidden = !isFast;
    if (isFast) drawCoefficients(byId("try-fast"), { ...trace.fast, actions: answer.actions });
    byId("try-reasoning").hidden = isFast || !answer.reasoning;
    byId("try-reasoning").textContent = answer.reasoning ?? "";
    byId("try-trees").hidden = !isDrawn;
    if (isDrawn) {
      byId("try-tree-title").textContent = describe(trace);
      drawTokens(byId("try-tokens"), trace, dimensionNames(action.length));
      drawTree(byId("try-tree"), trace);
    }
    this.#remember({ asked, action, trace, point, roundTripMs, picture: this.#picture });
  }

  #remember(run) {
    this.#runs.push(run);
    byId("try-history").hidden = false;
    byId("try-runs").replaceChildren(...this.#runs.map((one) => {
      const first = this.#runs.find((other) => other.picture === one.picture && other.asked.instruction === one.asked.instruction);
      const gap = Math.max(...one.action.map((value, index) => Math.abs(value - first.action[index])));
      const relaxed = one.trace ? one.trace.tokens.filter((token, index) => token !== one.trace.predicted[index]).length : NaN;
      const cells = [
        one.asked.radius || "–", one.trace ? String(one.trace.passes.length) : "–", number(relaxed, 0),
        milliseconds(one.point.total_ms), milliseconds(one.roundTripMs), one === first ? "first" : gap.toPrecision(3),
      ];
      return element("tr", {}, element("td", {}, one.asked.decoding),
        ...cells.map((text) => element("td", { class: "number" }, text)));
    }).reverse());
  }

  #say(text, state = "") {
    const said = byId("try-said");
    said.hidden = !text;
    said.textContent = text;
    said.dataset.state = state;
  }
}

// Of the example, where the policy knows it; else the first that it knows.
export function exampleInstruction(known) {
  const own = byId("try-instruction").defaultValue;
  return known.length && !known.includes(own) ? known[0] : own;
}

function fillSelect(select, names, chosen) {
  select.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
}
