// The mathematics of speculative decoding, pure: nothing here knows the page. Arrays are distributions over tokens.

export const accepted = (target, draft) => target.map((p, token) => Math.min(p, draft[token]));
export const residual = (target, draft) => target.map((p, token) => Math.max(0, p - draft[token]));
export const rejectionMass = (target, draft) => sum(residual(target, draft));

// One token by drafting, the ratio test, and a draw from the residual where it fails.
export function sampleOnce(target, draft, random = Math.random) {
  const token = draw(draft, random());
  if (random() < Math.min(1, target[token] / draft[token])) return { token, isAccepted: true };
  const rest = residual(target, draft);
  const mass = sum(rest);
  return { token: draw(rest.map((value) => value / mass), random()), isAccepted: false };
}

// Tokens a pass yields on average with K drafted tokens in a chain, each kept with probability alpha:
// the kept ones, and one of the target's own. The sum 1 + alpha + … + alpha^K.
export function tokensPerPass(alpha, length) {
  return alpha >= 1 ? length + 1 : (1 - alpha ** (length + 1)) / (1 - alpha);
}

// Cost of drafting K tokens and verifying them, in passes of the target.
export const costPerPass = (length, cost) => 1 + length * cost;

export const speedup = (alpha, length, cost) => tokensPerPass(alpha, length) / costPerPass(length, cost);

export function bestLength(alpha, cost, longest) {
  let best = 0;
  for (let length = 1; length <= longest; length++) {
    if (speedup(alpha, length, cost) > speedup(alpha, best, cost)) best = length;
  }
  return best;
}

// Passes an action of exactly `tokens` tokens takes on average. Drafting never goes beyond what is missing,
// and the token after the last needs no pass.
export function passesPerAction(alpha, length, tokens) {
  const expected = [0];
  for (let missing = 1; missing <= tokens; missing++) {
    const drafted = Math.min(length, missing);
    let passes = 1;
    for (let kept = 0; kept <= drafted; kept++) {
      const chance = kept < drafted ? alpha ** kept * (1 - alpha) : alpha ** drafted;
      passes += chance * expected[Math.max(0, missing - kept - 1)];
    }
    expected.push(passes);
  }
  return expected[tokens];
}

export function distance(one, other) {
  return sum(one.map((value, index) => Math.abs(value - other[index])));
}

export function normalised(weights) {
  const total = sum(weights);
  return weights.map((weight) => weight / total);
}

export function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function draw(distribution, at) {
  let left = at;
  for (let token = 0; token < distribution.length; token++) {
    left -= distribution[token];
    if (left < 0) return token;
  }
  return distribution.findLastIndex((value) => value > 0);
}
