"""Alerts fire at the first event that they are for."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app
from deft_server.settings import Settings

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
CASES = Path(__file__).parent / "alerts.test.yml"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Prometheus)")
def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.read_text().replace("[RULES]", f"[{RULES}]"))
    done = subprocess.run(["promtool", "test", "rules", cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    tested = re.findall(r"alertname: (\w+)\n *exp_alerts", CASES.read_text())
    assert {one["alert"] for one in rules} == set(tested)


def test_counters_that_alerts_read_exist_before_any_event(
    tmp_path: Path,
) -> None:
    """`increase()` does not see a series that is born with its first event."""
    page = create_app(ConstantPolicy(), Settings(record=tmp_path)).service.metrics.page().decode()
    present = {line.split(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    counters = re.findall(r"(?:increase|rate)\((deft_\w+_total)(\{[^}]*\})?", RULES.read_text())
    assert counters
    for name, labels in counters:
        if name == "deft_replica_seconds_total":
            continue  # replicas get their names when they come; the alert is on a rate of minutes
        found = [one for one in present if one.partition("{")[0] == name]
        if '="' in labels and "!=" not in labels:
            found = [one for one in found if labels.strip("{}") in one]
        assert found, name
