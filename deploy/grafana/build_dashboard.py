"""Writes dashboards/deft.json: panels from a table of titles and queries.

python deploy/grafana/build_dashboard.py
"""

import json
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).parent / "dashboards" / "deft.json"
SOURCE = {"type": "prometheus", "uid": "deft-prometheus"}
WINDOW = "$__rate_interval"
WIDTH, HEIGHT = 8, 8  # of 24 columns


@dataclass(frozen=True)
class Panel:
    """One plot: its queries by legend. `unit` is Grafana's name of it."""

    title: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    stacked: bool = False


def _quantiles(metric: str) -> dict[str, str]:
    """Return the queries of three quantiles of a histogram."""
    return {
        f"p{share}": f"histogram_quantile(0.{share}, "
        f"sum by (le) (rate({metric}_bucket{{instance=~'$instance'}}[{WINDOW}])))"
        for share in (50, 95, 99)
    }


def _rate(metric: str, by: str = "instance") -> str:
    """Return the query of a counter's rate per second."""
    return f"sum by ({by}) (rate({metric}{{instance=~'$instance'}}[{WINDOW}]))"


def _ratio(over: str, under: str) -> str:
    return f"{_rate(over)} / {_rate(under)}"


def _now(metric: str) -> str:
    return f"{metric}{{instance=~'$instance'}}"


PANELS = (
    Panel("Ready", "bool", {"{{instance}}": _now("deft_ready")}, kind="stat"),
    Panel("Actions per second", "ops", {"{{instance}}": _rate("deft_act_seconds_count")}),
    Panel("Time per frame", "s", _quantiles("deft_act_seconds")),
    Panel("Time in the queue", "s", _quantiles("deft_queue_seconds")),
    Panel("Time of a batch", "s", _quantiles("deft_batch_seconds")),
    Panel(
        "Frames per batch",
        "short",
        {
            "mean {{instance}}": _ratio("deft_batch_size_sum", "deft_batch_size_count"),
            "most allowed {{instance}}": _now("deft_max_batch"),
        },
    ),
    Panel(
        "Policy time by stage, per second",
        "percentunit",
        {
            "{{stage}}": _rate("deft_stage_seconds_total", "stage").replace(
                "{instance", "{stage!~'total|wire|queue', instance"
            )
        },
        stacked=True,
    ),
    Panel(
        "Passes per action",
        "short",
        {"mean {{instance}}": _ratio("deft_passes_sum", "deft_passes_count")},
    ),
    Panel(
        "Drafted and relaxed tokens per action",
        "short",
        {
            "drafted, kept {{instance}}": _ratio("deft_accepted_tokens_total", "deft_passes_count"),
            "relaxed {{instance}}": _ratio("deft_relaxed_tokens_total", "deft_passes_count"),
        },
    ),
    Panel(
        "Frames waiting, with the policy, in hand",
        "short",
        {
            "waiting {{instance}}": _now("deft_waiting_frames"),
            "with the policy {{instance}}": _now("deft_frames_with_policy"),
            "requests in hand {{instance}}": _now("deft_requests_in_hand"),
        },
    ),
    Panel("Replicas", "short", {"{{instance}}": _now("deft_replicas")}),
    Panel(
        "Busy share of each replica",
        "percentunit",
        {"{{replica}}": _rate("deft_replica_seconds_total", "replica")},
    ),
    Panel(
        "Batches per second of each replica",
        "ops",
        {"{{replica}}": _rate("deft_replica_batches_total", "replica")},
        stacked=True,
    ),
    Panel(
        "Time of a batch by replica",
        "s",
        {
            "{{replica}}": f"{_rate('deft_replica_seconds_total', 'replica')}"
            f" / {_rate('deft_replica_batches_total', 'replica')}"
        },
    ),
    Panel("Sessions", "short", {"{{instance}}": _now("deft_sessions")}),
    Panel(
        "Frames not answered",
        "ops",
        {"{{reason}}": _rate("deft_unanswered_frames_total", "reason")},
    ),
    Panel(
        "Frames not answered, by API key",
        "ops",
        {
            "{{key}}: {{outcome}}": _rate("deft_key_frames_total", "key, outcome").replace(
                "{instance", "{outcome!='answered', instance"
            )
        },
    ),
    Panel("Keys usable", "bool", {"{{instance}}": _now("deft_keys_usable")}, kind="stat"),
    Panel(
        "Requests by status",
        "reqps",
        {"{{status}}": _rate("deft_requests_total", "status")},
        stacked=True,
    ),
    Panel(
        "Policy failures and withheld answers",
        "ops",
        {
            "{{kind}}": _rate("deft_policy_failures_total", "kind"),
            "unsafe {{instance}}": _rate("deft_unsafe_answers_total"),
            "changed: {{kind}}": _rate("deft_interventions_total", "kind"),
        },
    ),
    Panel("Recording", "Bps", {"{{instance}}": _rate("deft_recorded_bytes_total")}),
    Panel(
        "Recording: on, and what it lost",
        "short",
        {
            "on {{instance}}": _now("deft_recording"),
            "steps written per second {{instance}}": _rate("deft_recorded_steps_total"),
            "steps dropped per second {{instance}}": _rate("deft_recording_dropped_steps_total"),
            "stops: {{reason}}": _rate("deft_recording_stops_total", "reason"),
        },
    ),
    Panel("Memory", "bytes", {"{{instance}}": _now("process_resident_memory_bytes")}),
)


def build() -> dict[str, object]:
    """Return the dashboard as Grafana reads it."""
    return {
        "uid": "deft",
        "title": "Deft",
        "tags": ["deft"],
        "timezone": "browser",
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_instances()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _instances() -> dict[str, object]:
    return {
        "name": "instance",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(deft_ready, instance)", "refId": "instances"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, panel: Panel) -> dict[str, object]:
    columns = 24 // WIDTH
    row, column = divmod(number, columns)
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}}
        if panel.kind == "timeseries"
        else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend,
                "datasource": SOURCE,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(build(), indent=1) + "\n")
