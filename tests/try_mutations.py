"""Break the decoding code in one place at a time and say whether a test notices.

    python -m tests.try_mutations [NUMBER...]

Each mutation is applied to a copy, so that the sources stay as they are. Exit code 1 where one
survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "policies" / "deft_policies"
TESTS = ROOT / "tests" / "policies"
TIMEOUT_S = 600


@dataclass(frozen=True)
class Mutation:
    """One edit of a module of `decoding`, and the test file that has to fail."""

    module: str
    old: str
    new: str
    test: str


SAMPLED, RULES = "decoding/test_sampled.py", "decoding/acceptance/test_rules.py"
LOOP, PASSES = "decoding/test_published_loop.py", "decoding/test_passes.py"
GUARD = "decoding/test_guard.py"
SMALL = "decoding/drafts/test_small_model.py"
RECYCLING = "decoding/drafts/test_token_recycling.py"
DRAFT_MODEL = "openvla/test_draft_model.py"
PLUGINS, DRIFT = "decoding/test_plugins.py", "decoding/test_drift.py"

MUTATIONS = (
    # What no test noticed before there was this list.
    Mutation(
        "verify",
        "odds = torch.where(stands[:, None], p[:, node], odds)",
        "odds = torch.where(stands[:, None], _without_draft(p[:, node], q[:, node]), odds)",
        SAMPLED,
    ),
    Mutation(
        "verify",
        "self.coins[rows, self._place(scored, depth), tries",
        "self.coins[rows, self._place(scored, depth) * 0, tries",
        SAMPLED,
    ),
    Mutation(
        "drafts/growth",
        "return (odds / noise).argmax(dim=-1)",
        "return odds.argmax(dim=-1)",
        SAMPLED,
    ),
    Mutation(
        "drafts/growth",
        "every.append(odds)",
        "every.append(odds**3 / (odds**3).sum(dim=2, keepdim=True))",
        SAMPLED,
    ),
    Mutation("guard", "* (1 - self._settings.margin)", "", GUARD),
    Mutation(
        "methods",
        "DeferredWindow(theta=0.3, window=6)",
        "DeferredWindow(theta=0.05, window=6)",
        RULES,
    ),
    Mutation(
        "methods",
        "DeferredWindow(theta=0.3, window=6)",
        "DeferredWindow(theta=0.3, window=1)",
        RULES,
    ),
    Mutation("methods", "share=0.7,", "share=0.4,", RULES),
    Mutation("methods", "num_patches=10,", "num_patches=1,", RULES),
    Mutation("methods", "shift_tolerant=True, shift_cap", "shift_tolerant=False, shift_cap", RULES),
    # Twenty more.
    Mutation(
        "verify",
        "odds = torch.where((asked & ~stands)[:, None], left, odds)",
        "odds = torch.where((asked & ~stands)[:, None], odds, odds)",
        SAMPLED,
    ),
    Mutation(
        "verify", "tries = torch.where(stands, 0, tries + asked)", "tries = tries * 0", SAMPLED
    ),
    Mutation(
        "verify",
        "(coin * q[rows, node, token] < odds[rows, token])",
        "(coin * q[rows, node, token] < p[rows, 0, token])",
        SAMPLED,
    ),
    Mutation(
        "verify",
        "(tree.parents[:, node] == at) & is_judged",
        "(tree.parents[:, node] <= at) & is_judged",
        SAMPLED,
    ),
    Mutation(
        "verify",
        "noise = self.noise[rows, self._place(scored, depth)]",
        "noise = self.noise[rows, self._place(scored, depth * 0)]",
        SAMPLED,
    ),
    Mutation("sampling", "DRAFT = 1", "DRAFT = 0", SAMPLED),
    Mutation(
        "verify",
        "kept = torch.minimum(chosen.num_accepted, scored.deepest.clamp(min=0))",
        "kept = chosen.num_accepted",
        LOOP,
    ),
    Mutation(
        "verify",
        "bonus = chosen.own.gather(1, kept[:, None]).squeeze(1)",
        "bonus = chosen.bonus",
        LOOP,
    ),
    Mutation("plan", "return 1 if self is Loop.PUBLISHED else 0", "return 0", LOOP),
    Mutation("methods", "        loop=Loop.PUBLISHED,\n", "", LOOP),
    Mutation("decoder", "self._late = method.loop is Loop.PUBLISHED", "self._late = False", LOOP),
    Mutation(
        "acceptance/rule",
        "/ math.log(self.num_tokens)",
        "/ math.log(len(self.action_tokens))",
        RULES,
    ),
    Mutation("acceptance/confidence", "        if self.gate:\n", "        if True:\n", RULES),
    Mutation(
        "acceptance/confidence",
        "shifted = shifted & (scored.deviations.abs() <= self.shift_cap)[:, None]",
        "shifted = shifted & True",
        RULES,
    ),
    Mutation("history", "leak * old + (done - wanted)", "(done - wanted)", DRIFT),
    Mutation(
        "drafts/head",
        "return self._counters.prompt - 2",
        "return self._counters.prompt - 1",
        "decoding/drafts/test_head.py",
    ),
    Mutation("knobs", "if not 0 <= number <= LARGEST or", "if", PLUGINS),
    Mutation(
        "knobs",
        "return replace(method, plans=(found[0],), is_guarded=False)",
        "return method",
        PLUGINS,
    ),
    Mutation("plan", "theirs = sorted(", "theirs = [] and sorted(", PLUGINS),
    Mutation("decoder", "plan=plan.name,", 'plan="",', PASSES),
    # Branches of a tree, draft models, recycled tokens and judging timed apart.
    Mutation(
        "acceptance/confidence",
        "branches.sum(dim=2, keepdim=True) * self.share",
        "branches.any(dim=1).sum(dim=1)[:, None, None] * self.share",
        RULES,
    ),
    Mutation(
        "drafts/small_model",
        "end = last.accepted.num_accepted + 1",
        "end = last.accepted.num_accepted",
        SMALL,
    ),
    Mutation("drafts/small_model", "end * is_open)", "end + 1)", SMALL),
    Mutation(
        "drafts/small_model",
        "_with_level(tree, level + nodes.above,",
        "_with_level(tree, nodes.above,",
        SMALL,
    ),
    Mutation("drafts/small_model", "(tree.tokens + self._shift)", "(tree.tokens)", SMALL),
    Mutation(
        "drafts/small_model",
        "first_token = self._drafted.first - self._shift",
        "first_token = self._drafted.first",
        SMALL,
    ),
    Mutation(
        "drafts/small_model",
        "((ahead.guessed[:, 0] == nodes.tokens[:, 0]) | is_done).all()",
        "((ahead.guessed[:, 0] == nodes.tokens[:, 0]) | is_done).any()",
        SMALL,
    ),
    Mutation(
        "drafts/small_model",
        "num_committed=known)",
        "num_committed=known * 0)",
        SMALL,
    ),
    Mutation("methods", "        multi_level=True,\n", "", SMALL),
    Mutation("drafts/small_model", "prompts = prompts.for_draft()", "pass", DRAFT_MODEL),
    Mutation("../openvla/load", "check_fits(draft, parts)", "pass", DRAFT_MODEL),
    Mutation("../openvla/policy", "lambda: _take(for_draft(), rows)", "for_draft", DRAFT_MODEL),
    Mutation(
        "drafts/token_recycling",
        "torch.where(fresh > -torch.inf, fresh, table)",
        "table",
        RECYCLING,
    ),
    Mutation("drafts/token_recycling", "-age.float()", "age.float()", RECYCLING),
    Mutation("records", "(Stage.JUDGE,)", "(Stage.VERIFY,)", "openvla/test_policy.py"),
)


def main(arguments: list[str]) -> int:
    """Try all mutations, or those of these numbers."""
    chosen = [int(one) for one in arguments] or list(range(len(MUTATIONS)))
    survived = 0
    for number in chosen:
        is_killed = try_mutation(MUTATIONS[number])
        survived += not is_killed
        verdict = "killed" if is_killed else "SURVIVED"
        one = MUTATIONS[number]
        sys.stdout.write(f"{number:2} {verdict:8} {one.module}: {one.new.strip()[:70]!r}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - survived} of {len(chosen)} killed\n")
    return int(survived > 0)


def try_mutation(mutation: Mutation) -> bool:
    """Whether the test fails over a copy with the edit."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / "decoding" / f"{mutation.module}.py"
        text = path.read_text()
        if mutation.old not in text:
            raise SystemExit(f"{path.name} has no {mutation.old!r} any more; mend the mutation")
        path.write_text(text.replace(mutation.old, mutation.new))
        return run_tests(Path(folder), TESTS / mutation.test) != 0


def run_tests(folder: Path, test: Path) -> int:
    """The exit code of pytest with the packages of a folder before ours."""
    paths = [folder, ROOT, *(ROOT / one for one in ("client", "server", "policies"))]
    joined = " ".join(map(str, paths))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={joined}", str(test)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
