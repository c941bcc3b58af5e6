"""The committed plan of the last evaluation is of the policy that ships, and of its states."""

import tomllib

from deft_policies import tiny_libero
from deft_policies.checkpoint.tensor_file import digest_weights
from tests.repository import ROOT

PLAN = tomllib.loads((ROOT / "docs/results/final.toml").read_text())


def test_the_committed_plan_is_of_the_policy_that_ships():
    assert PLAN["served"]["digest of weights"] == digest_weights([tiny_libero.CHECKPOINT])
    for head in tiny_libero.HEADS:
        assert PLAN["served"][f"digest of head {head.name}"] == digest_weights([head])


def test_the_committed_plan_plays_what_the_policy_holds_out():
    names = [cell["name"] for cell in PLAN["cell"]]
    assert names == ["plain", "deft", "thinking", "moved", "bfloat16"]
    for cell in PLAN["cell"]:
        assert cell["eval"].startswith("libero_object --trials 30-39 ")
        assert "--no-guard" not in cell["serve"]
