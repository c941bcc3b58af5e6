// What rules and plans are called in a sentence. Knows their names, and nothing of pages.

// A rule's text is its name with its numbers, another rule's among them: WithinDrift(rule=WithinLimits(move=3.5, ...), ...).
const RULES = {
  ExactMatch: () => "same tokens as plain decoding",
  WithinLimits: (its) => `off by at most ${its.move} mm and ${its.turn}° a step`,
  WithinDrift: (its) => `${describeRule(its.rule)}, and ${its.move} mm and ${its.turn}° in all`,
  WithinNumbers: () => "numbers near the model's own",
  WithinIds: (its) => `tokens at most ${its.radius} away from the model's own`,
  WithinBins: (its) => `at most ${its.radius} bins away from the model's own`,
  WithinBudget: (its) => `at most ${its.each} bins away, and ${its.total} in an action`,
  ScheduledRadius: (its) => `${its.low} to ${its.high} bins away, by how fast the arm moves`,
  DeferredWindow: (its) => `a wrong token stands if the next ${its.window} are right`,
  VisualRelevance: (its) => `looser where the picture matters little`,
  TopK: (its) => `among the model's ${its.k} best tokens`,
  NearTop: (its) => `among the model's ${its.n} best tokens, and nearly as likely`,
  EntropyRadius: (its) => `${its.low} to ${its.high} bins away, by how unsure the model is`,
};

const PLANS = {
  plain: "drafts nothing",
  memory: "drafts the last action",
  "memory-once": "drafts the last action, in the first pass alone",
  "memory+recycled": "drafts the last action, then what followed such tokens before",
  "memory+tree": "drafts the last action, then a tree of the draft head",
  "memory+branches": "drafts the last action, then branches of the draft head",
  "memory+chain": "drafts the last action, then a chain of the draft head",
  "head-chain": "drafts a chain of the draft head",
  "previous-answer": "drafts the last text",
  "previous-numbers": "drafts the last numbers",
};

// A name that is not known stands as it is.
export function describeRule(text) {
  const [, name, inside] = /^(\w+)\((.*)\)$/.exec(text) ?? [];
  return RULES[name]?.(argumentsOf(inside)) ?? text;
}

export const describePlan = (name) => PLANS[name] ?? name;

// The commas of a rule within are its own.
function argumentsOf(inside) {
  const found = {};
  let depth = 0, start = 0;
  for (let at = 0; at <= inside.length; at++) {
    depth += { "(": 1, ")": -1 }[inside[at]] ?? 0;
    if (at < inside.length && (inside[at] !== "," || depth)) continue;
    const [name, ...value] = inside.slice(start, at).split("=");
    found[name.trim()] = value.join("=");
    start = at + 1;
  }
  return found;
}
