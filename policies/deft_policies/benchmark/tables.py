"""Tables of a benchmark as text that is also Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deft_client.commands.table import markdown_table, without_empty
from deft_client.libero.results.statistics import Percentiles
from deft_policies.benchmark.audit import AuditReport, describe
from deft_policies.benchmark.roofline import DeviceRates, Roofline
from deft_policies.benchmark.speedup import Speedup
from deft_policies.benchmark.summary import STAGES, Decoding, Speed
from deft_policies.decoding.methods import AUTOREGRESSIVE

_MOST_POSITIONS = 64  # of an answer; a text has hundreds


@dataclass(frozen=True, eq=False)
class Report:
    """Everything a benchmark found; what could not be measured for this policy is empty."""

    details: Mapping[str, str]
    speeds: tuple[Speed, ...]
    baseline: str | None  # the name in `speeds` that ratios refer to
    decodings: tuple[Decoding, ...] = ()
    rooflines: tuple[Roofline, ...] = ()  # in the order of `speeds`
    rates: DeviceRates | None = None
    audit: AuditReport | None = None

    def render(self) -> str:
        """Tables and verdicts, as text that is also Markdown."""
        found = [speed for speed in self.speeds if speed.name == self.baseline]
        parts = [
            "  ".join(f"{name}={value}" for name, value in self.details.items()),
            speed_table(self.speeds, found[0] if found else None),
        ]
        for index, speed in enumerate(self.speeds):
            roofline = self.rooflines[index] if self.rooflines else None
            parts.append(stage_table(speed, roofline))
        if self.rates is not None:
            parts.append(_say_rates(self.rates))
        if self.decodings:
            parts += ["\n".join(f"{one.name}: {one.rule}" for one in self.decodings if one.rule)]
            longest = max(len(one.committed_by_start) for one in self.decodings)
            by_position = () if longest > _MOST_POSITIONS else (length_table, position_table)
            tables = (decoding_table, *by_position, speedup_table)
            parts += [table(self.decodings) for table in tables]
            parts += [batch_table(self.speeds, AUTOREGRESSIVE), *_say_waits(self.decodings)]
        if self.audit is not None:
            parts.append(describe(self.audit))
        return "\n\n".join(part for part in parts if part)


def _say_rates(rates: DeviceRates) -> str:
    return (
        f"limits: {rates.description} copies {rates.bytes_per_s / 1e9:.1f} GB/s and multiplies "
        f"{rates.flops_per_s / 1e12:.3f} TFLOP/s, measured now; a model that fits into the "
        "processor's cache may read faster than that"
    )


Rows = list[list[str]]


def render(headings: Sequence[str], rows: Rows) -> str:
    """A table whose columns are aligned."""
    return markdown_table(headings, rows, aligned=True).rstrip()


def speed_table(speeds: Sequence[Speed], baseline: Speed | None) -> str:
    """All contenders, one row each, and how many times faster than the baseline they are."""
    headings = ["ms per answer", "batch", "p50", "p95", "p99", "mean", "actions/s"]
    if baseline is not None:
        headings += [f"x {baseline.name}", "95%", "by medians"]
    rows, doubts = [], dict[str, None]()
    for speed in speeds:
        cells = [*_cells(speed.total, 2), f"{speed.total.mean:.2f}", f"{speed.actions_per_s:.1f}"]
        row = [speed.name, str(speed.batch_size), *cells]
        if baseline is not None:
            found = speed.faster_than(baseline)
            doubts |= dict.fromkeys(found.doubts)
            told = [f"{found.times:.2f}", found.interval_text, f"{found.of_medians:.2f}"]
            row += ["–"] * 3 if found.doubts else told
        rows.append(row)
    note = f"\n\nNo speed-up is told: {'; '.join(doubts)}." if doubts else ""
    return render(*without_empty(headings, rows)) + note


def stage_table(speed: Speed, roofline: Roofline | None) -> str:
    """One contender by stage, with the limits of this device where they are known."""
    headings = [f"{speed.name}: ms", "p50", "p95", "p99"]
    if roofline is not None:
        headings += ["limit", "% of limit", "GB/s", "TFLOP/s"]
    rows: Rows = []
    for stage, _ in STAGES:
        times = speed.stages[stage]
        row = [stage, *_cells(times, 3)]
        if roofline is not None:
            row += _limit_cells(roofline, stage, times.p50)
        rows.append(row)
    row = ["total", *_cells(speed.total, 3)]
    if roofline is not None:
        share = 100 * roofline.total_ms / speed.total.p50
        row += [f"{roofline.total_ms:.3f}", f"{share:.1f}", "", ""]
    return render(headings, [*rows, row])


_DECODING: Mapping[str, Callable[[Decoding], str]] = {
    "decoding": lambda one: one.name,
    "passes": lambda one: f"{one.passes:.2f}" if one.passes else "-",  # not every engine tells
    "committed": lambda one: f"{one.committed:.2f}" if one.passes else "-",
    "relaxed %": lambda one: f"{100 * one.relaxed_share:.1f}",
    "equal %": lambda one: f"{100 * one.equal_actions:.1f}",
    "bins mean": lambda one: f"{one.mean_bins:.2f}",
    "bins max": lambda one: str(one.max_bins),
    "mm": lambda one: f"{one.mean_mm:.3f}",
    "deg": lambda one: f"{one.mean_deg:.3f}",
}


def decoding_table(decodings: Sequence[Decoding]) -> str:
    """How each method decoded, and how far its actions are from plain decoding's."""
    return render(
        list(_DECODING), [[cell(one) for cell in _DECODING.values()] for one in decodings]
    )


def position_table(decodings: Sequence[Decoding]) -> str:
    """Share of accepted drafts at each token of an action, and committed length by pass."""
    return _two_series(
        decodings,
        "drafted % at token / committed in pass",
        lambda one: [f"{100 * share:.0f}" for share in one.drafted_by_position],
        lambda one: [f"{length:.2f}" for length in one.committed_by_pass],
        ("t{}", 1, "pass {}"),
    )


def length_table(decodings: Sequence[Decoding]) -> str:
    """Accepted lengths of the passes that had guesses, and committed length by where they start.

    As Spec-VLA's Tables 2 and 3 count for its own loop (`spec-vla-published`). Its Table 3 leaves
    the bonus out, so it is less by one, and its position p is token t(p+2) here.
    """
    return _two_series(
        decodings,
        "% of drafted passes that accept n / committed from token",
        lambda one: [f"{100 * share:.1f}" for share in one.accepted_shares],
        lambda one: [f"{length:.2f}" if length else "" for length in one.committed_by_start],
        ("n={}", 0, "t{}"),
    )


_SPEEDUP: Mapping[str, Callable[[Speedup], str]] = {
    "acceptance": lambda one: f"{one.acceptance:.2f}",
    "length": lambda one: f"{one.length:.2f}",
    "cost": lambda one: f"{one.cost:.3f}",
    "pass": lambda one: f"{one.pass_cost:.2f}",
    "predicted": lambda one: f"{one.predicted:.2f}x",
    "measured": lambda one: f"{one.measured:.2f}x",
}


def speedup_table(decodings: Sequence[Decoding]) -> str:
    """What acceptance, draft length and cost should bring after the prefill, and what they did."""
    rows = [
        [one.name, *(cell(found) for cell in _SPEEDUP.values())]
        for one in decodings
        if (found := one.speedup) is not None
    ]
    return render(["passes behind the prefill", *_SPEEDUP], rows) if rows else ""


def batch_table(speeds: Sequence[Speed], baseline: str) -> str:
    """Actions per second by batch size, and how many times those of the baseline at that size."""
    sizes = sorted({speed.batch_size for speed in speeds})
    if len(sizes) < 2:
        return ""
    rates: dict[str, dict[int, float]] = {}
    for speed in speeds:
        name = speed.name.removesuffix(f" x{speed.batch_size}")
        rates.setdefault(name, {})[speed.batch_size] = speed.actions_per_s
    plain = rates.get(baseline, {})
    rows = [[name, *(_rate(found, plain, size) for size in sizes)] for name, found in rates.items()]
    return render([f"actions/s (x {baseline})", *(f"batch {size}" for size in sizes)], rows)


def _rate(found: Mapping[int, float], plain: Mapping[int, float], size: int) -> str:
    if size not in found:
        return ""
    ratio = f" ({found[size] / plain[size]:.2f})" if size in plain else ""
    return f"{found[size]:.1f}{ratio}"


def _say_waits(decodings: Sequence[Decoding]) -> list[str]:
    return [
        f"{one.name}: its rule makes the host wait for the device and runs outside recordings: "
        f"{one.wait}"
        for one in decodings
        if one.wait is not None
    ]


def _two_series(
    decodings: Sequence[Decoding],
    title: str,
    left: Callable[[Decoding], list[str]],
    right: Callable[[Decoding], list[str]],
    headings: tuple[str, int, str],
) -> str:
    """Two series of cells side by side, a row per method, short ones filled up.

    `headings` are the left columns' format and first number, and the right columns' format.
    """
    lefts, first, rights = headings
    rows = [(one.name, left(one), right(one)) for one in decodings if one.passes]
    wide = max(len(cells) for _, cells, _ in rows)
    deep = max(len(cells) for _, _, cells in rows)
    names = [lefts.format(first + index) for index in range(wide)]
    names += [rights.format(1 + index) for index in range(deep)]
    return render(
        [title, *names],
        [[name, *a, *[""] * (wide - len(a)), *b, *[""] * (deep - len(b))] for name, a, b in rows],
    )


def _cells(times: Percentiles, digits: int) -> list[str]:
    return [f"{one:.{digits}f}" for one in (times.p50, times.p95, times.p99)]


def _limit_cells(roofline: Roofline, stage: str, p50: float) -> list[str]:
    limit = roofline.stages.get(stage)
    if limit is None or p50 == 0.0 or limit.floor_ms == 0.0:
        return ["", "", "", ""]
    return [
        f"{limit.floor_ms:.3f}",
        f"{100 * limit.floor_ms / p50:.1f}",
        f"{limit.cost.num_bytes / p50 / 1e6:.2f}",
        f"{limit.cost.num_flops / p50 / 1e9:.3f}",
    ]
