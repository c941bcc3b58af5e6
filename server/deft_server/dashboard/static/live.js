// The live view: figures of the whole server, the list of sessions, and everything about one of them.

import { element, milliseconds, number } from "./draw.js";
import { dimensionNames, drawAccepted, drawActions, drawLatency, drawTimeline } from "./plots.js";
import { describePlan, describeRule } from "./words.js";
import { drawCoefficients, sentence } from "./coefficients.js";
import { drawPointed, showReasoning } from "./reasoning.js";
import { drawTokens, drawTree } from "./tree.js";

const KEPT = 240; // points of the watched session
const IDLE_S = 5;
const byId = (id) => document.getElementById(id);

export class LiveView {
  onWatch = () => {};
  #watched = null;
  #chosen = false;
  #points = [];
  #trace = null;
  #thought = null;
  #timeline = [];
  #sessions = [];
  #rows = new Map(); // session key -> its button
  #scheduled = 0;

  show({ overview, sessions, watched, timeline }) {
    if (timeline) this.#showTimeline(timeline);
    if (overview) this.#showOverview(overview);
    if (sessions) this.#showSessions(sessions);
    if (watched) this.#showWatched(watched);
  }

  // Without a connection nothing is known of the server: what stands there is of before.
  setState(state) {
    const isLive = state === "good";
    byId("phase").hidden = !isLive; // one status: the server's, or that it is not heard
    byId("link").hidden = isLive;
    byId("live").classList.toggle("stale", !isLive);
  }

  draw() {
    if (byId("live").hidden) return;
    this.#showTimeline(this.#timeline);
    if (!this.#points.length) return;
    drawActions(byId("actions"), this.#points);
    drawLatency(byId("latency"), byId("latency-legend"), this.#points);
    const mean = drawAccepted(byId("accepted"), byId("accepted-legend"), this.#points);
    byId("accepted-now").textContent = Number.isFinite(mean) && this.#trace ? `${number(mean, 2)} drafted tokens kept per checking pass` : "";
    const last = this.#points.at(-1);
    byId("latency-now").textContent = `last 60 actions · now ${milliseconds(last.total_ms)} ms`;
    if (this.#thought?.fast) drawCoefficients(byId("thought-fast"), this.#thought.fast);
    if (this.#trace) {
      drawTokens(byId("tokens"), this.#trace, dimensionNames(last.action.length));
      drawTree(byId("tree"), this.#trace);
      byId("method").textContent = describe(this.#trace);
    } else {
      byId("method").textContent = "answers are traced while this page is open";
    }
  }

  #showOverview(figures) {
    const phase = byId("phase");
    phase.dataset.state = { ready: "good", loading: "warn", draining: "warn" }[figures.phase] ?? "bad";
    if (phase.textContent !== figures.phase) phase.textContent = figures.phase;
    phase.title = figures.phase_text;
    put("rate", number(figures.rate_hz ?? NaN));
    put("p50", milliseconds(figures.p50_ms ?? NaN), "ms");
    put("p95", milliseconds(figures.p95_ms ?? NaN), "ms");
    put("p99", milliseconds(figures.p99_ms ?? NaN), "ms");
    put("passes", number(figures.passes_per_action ?? NaN, 2));
    put("relaxed", number((figures.relaxed_share ?? NaN) * 100), "%");
    put("waiting", String(figures.waiting));
    put("errors", String(figures.errors));
  }

  #showTimeline(timeline) {
    this.#timeline = timeline;
    byId("past").hidden = !timeline.length;
    if (timeline.length) byId("past-now").textContent = drawTimeline(byId("timeline"), timeline);
  }

  #showSessions(sessions) {
    byId("nobody").hidden = sessions.length > 0;
    byId("robots").hidden = sessions.length === 0;
    this.#sessions = sessions;
    const present = new Set(sessions.map((one) => one.key));
    for (const [key, row] of this.#rows) {
      if (present.has(key)) continue;
      row.parentNode.remove();
      this.#rows.delete(key);
    }
    for (const one of sessions) this.#fillRow(this.#rows.get(one.key) ?? this.#addRow(one.key), one);
  }

  // Rows stay what and where they are while others come and go, and so does the keyboard's focus.
  #addRow(key) {
    const row = element("button", { type: "button" },
      element("img", { alt: "", width: 44, height: 44 }),
      element("div", {}, element("strong"), element("span"), element("span")));
    row.addEventListener("click", () => this.#choose(key));
    byId("sessions").append(element("li", {}, row));
    this.#rows.set(key, row);
    return row;
  }

  #fillRow(row, session) {
    const [picture, told] = row.children;
    const [name, instruction, pace] = told.children;
    if (session.thumbnail && picture.src !== session.thumbnail) picture.src = session.thumbnail;
    name.textContent = session.name;
    row.title = session.session_id;
    instruction.textContent = session.instruction;
    pace.textContent = pace_of(session);
    row.setAttribute("aria-pressed", String(session.key === this.#watched));
    if (session.key === this.#watched) this.#showFacts(session);
  }

  #showFacts(session) {
    byId("watched-name").textContent = session.name;
    byId("watched-note").textContent = session.note;
    byId("watched-note").hidden = !session.note;
    const facts = [["key", session.caller], ["session", session.session_id], ["actions seen", session.answers], ["rate", `${number(session.rate_hz)} Hz`]];
    if (session.errors) facts.push(["late", session.late], ["unanswered in all", session.errors]);
    byId("facts").replaceChildren(...facts.flatMap(([label, value]) => [
      element("dt", {}, label), element("dd", { class: "number" }, String(value)),
    ]));
  }

  #choose(key) {
    if (key === this.#watched) return;
    this.#watched = key;
    this.#chosen = true;
    this.#points = [];
    this.#trace = null;
    this.#showThought(null);
    for (const id of ["tokens", "tree"]) byId(id).replaceChildren();
    byId("method").textContent = "";
    this.onWatch(key);
    this.#showSessions(this.#sessions);
  }

  // The picture may come with it, or be there already: it is drawn over when its size is known.
  #showThought(thought) {
    this.#thought = thought;
    for (const id of ["thought", "pointed"]) byId(id).toggleAttribute("hidden", !thought);
    byId("trees").hidden = Boolean(thought);
    if (!thought) return;
    this.#trace = null;
    const isAction = Boolean(thought.rows || thought.fast);
    byId("thought-title").textContent = thought.fast ? "Answer in FAST codes" : thought.rows ? "Answer as it was written" : "Reasoning";
    byId("thought-marks").dataset.swatch = isAction ? "draft" : "relaxed";
    byId("thought-marks").textContent = isAction ? "marked: accepted drafts" : "marked: not so in the frame before";
    byId("thought-parts").hidden = Boolean(thought.fast);
    byId("thought-fast").hidden = !thought.fast;
    showReasoning(byId("thought-parts"), byId("thought-cost"), thought);
    if (thought.fast) byId("thought-cost").textContent += ` · ${sentence(thought.fast)}`;
    const frame = byId("frame");
    frame.onload = () => drawPointed(byId("pointed"), thought, frame.naturalWidth, frame.naturalHeight);
    if (frame.complete && frame.naturalWidth) frame.onload();
  }

  #showWatched(news) {
    if (this.#chosen && news.key !== this.#watched) return; // of the session watched before
    if (news.key !== this.#watched) {
      this.#watched = news.key;
      this.#showSessions(this.#sessions);
    }
    if (news.restart) this.#points = [];
    if (news.points) this.#points = [...this.#points, ...news.points].slice(-KEPT);
    if (news.trace) this.#trace = news.trace;
    if (news.thought !== undefined) this.#showThought(news.thought);
    if (news.frames) showFrames(news.frames);
    byId("instruction").textContent = news.instruction;
    cancelAnimationFrame(this.#scheduled);
    this.#scheduled = requestAnimationFrame(() => this.draw());
  }
}

function pace_of(session) {
  const words = session.ended_s !== null ? [`ended ${ago(session.ended_s)}`]
    : session.idle_s > IDLE_S ? [`last frame ${ago(session.idle_s)}`]
      : [`${number(session.rate_hz)} Hz`, `${milliseconds(session.last_ms ?? NaN)} ms`];
  const others = session.errors - session.late;
  if (session.late) words.push(`${session.late} late`);
  if (others) words.push(`${others} ${others === 1 ? "error" : "errors"}`);
  return words.join(" · ");
}

const ago = (seconds) => seconds < 60 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;

// The main camera's name is empty.
function showFrames({ "": main, ...others }) {
  if (main) byId("frame").src = main;
  byId("frame").hidden = !main;
  byId("no-frame").hidden = Boolean(main);
  byId("cameras").replaceChildren(...Object.entries(others).map(([name, src]) => element("li", {},
    element("img", { src, alt: `Last frame of the camera ${name}` }), element("small", {}, name))));
}

export function describe(trace) {
  const kept = trace.passes.map((pass) => pass.path.length);
  const relaxed = trace.tokens.filter((token, index) => token !== trace.predicted[index]).length;
  return [
    trace.method,
    trace.rule && describeRule(trace.rule),
    trace.plan && describePlan(trace.plan),
    `${trace.passes.length} ${trace.passes.length === 1 ? "pass" : "passes"}`,
    `${kept.reduce((sum, one) => sum + one, 0)} of ${trace.tokens.length} tokens drafted`,
    relaxed ? `${relaxed} relaxed` : "none relaxed",
    trace.guard,
  ].filter(Boolean).join(" · ");
}

function put(name, text, unit = "") {
  const box = byId(`figure-${name}`);
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(text, unit && text !== "–" ? element("small", {}, unit) : "");
}
