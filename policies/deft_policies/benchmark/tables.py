"""Tables of a benchmark as text that is also Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from deft_client.measures.statistics import Percentiles
from deft_client.measures.table import markdown_table
from deft_policies.benchmark.audit import (
    AuditReport,
    EqualityCheck,
    describe,
    describe_equality,
)
from deft_policies.benchmark.roofline import DeviceRates, Roofline
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
    equality: tuple[EqualityCheck, ...] = ()

    @property
    def has_faults(self) -> bool:
        """Whether an audit was asked for and found answers that must not be."""
        audited = self.audit is not None and bool(self.audit.faults)
        return audited or any(check.is_broken for check in self.equality)

    def render(self) -> str:
        """Tables and verdicts, as text that is also Markdown."""
        found = [speed for speed in self.speeds if speed.name == self.baseline]
        parts = [
            "  ".join(f"{name}={value}" for name, value in self.details.items()),
            speed_table(self.speeds, found[0] if found else None),
        ]
        tables = zip_longest(self.speeds, self.rooflines)
        parts += [stage_table(speed, roofline) for speed, roofline in tables]
        if self.rates is not None:
            parts.append(_say_rates(self.rates))
        if self.decodings:
            parts += ["\n".join(f"{one.name}: {one.rule}" for one in self.decodings if one.rule)]
            longest = max(len(one.committed_by_start) for one in self.decodings)
            by_position = () if longest > _MOST_POSITIONS else (length_table, position_table)
            of_methods = (decoding_table, *by_position)
            parts += [table(self.decodings) for table in of_methods]
            parts.append(batch_table(self.speeds, AUTOREGRESSIVE))
            parts += [
                f"{one.name}: nothing was drafted in any pass"
                for one in self.decodings
                if one.rule and not any(one.drafted_by_position)
            ]
            parts += [
                f"{one.name}: its rule makes the host wait for the device and runs outside "
                f"recordings: {one.wait}"
                for one in self.decodings
                if one.wait is not None
            ]
        if self.audit is not None:
            parts.append(describe(self.audit))
        parts += [describe_equality(check) for check in self.equality]
        return "\n\n".join(part for part in parts if part)


def _say_rates(rates: DeviceRates) -> str:
    return (
        f"limits: {rates.description} copies {rates.bytes_per_s / 1e9:.1f} GB/s and multiplies "
        f"{rates.flops_per_s / 1e12:.3f} TFLOP/s, measured now; a model that fits into the "
        "processor's cache may read faster than that"
    )


def render(rows: Sequence[Mapping[str, str]], empty: str = "") -> str:
    """A table whose columns are aligned. A row is its cells by heading; it may lack some."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [[row.get(heading, empty) for heading in headings] for row in rows]
    return markdown_table(headings, cells, aligned=True).rstrip()


def speed_table(speeds: Sequence[Speed], baseline: Speed | None) -> str:
    """All contenders, one row each, and how many times faster than the baseline they are."""
    rows, doubts = [], dict[str, None]()
    for speed in speeds:
        row = {"ms per answer": speed.name, "batch": str(speed.batch_size)}
        row |= _quantiles(speed.total, 2)
        row |= {"mean": f"{speed.total.mean:.2f}", "actions/s": f"{speed.actions_per_s:.1f}"}
        found = None if baseline is None else speed.faster_than(baseline)
        if baseline is not None and found is not None and not found.doubts:
            row |= {f"x {baseline.name}": f"{found.times:.2f}", "95%": found.interval_text}
            row["by medians"] = f"{found.of_medians:.2f}"
        doubts |= dict.fromkeys(found.doubts if found else ())
        rows.append(row)
    note = f"\n\nNo speed-up is told: {'; '.join(doubts)}." if doubts else ""
    return render(rows, empty="–") + note


def stage_table(speed: Speed, roofline: Roofline | None) -> str:
    """One contender by stage, with the limits of this device where they are known."""
    title = f"{speed.name}: ms"
    rows = []
    for stage, _ in STAGES:
        times = speed.stages[stage]
        row = {title: stage, **_quantiles(times, 3)}
        limit = None if roofline is None else roofline.stages.get(stage)
        if limit is not None and times.p50 and limit.floor_ms:
            row["limit"] = f"{limit.floor_ms:.3f}"
            row["% of limit"] = f"{100 * limit.floor_ms / times.p50:.1f}"
            row["GB/s"] = f"{limit.cost.num_bytes / times.p50 / 1e6:.2f}"
            row["TFLOP/s"] = f"{limit.cost.num_flops / times.p50 / 1e9:.3f}"
        rows.append(row)
    total = {title: "total", **_quantiles(speed.total, 3)}
    if roofline is not None:
        total["limit"] = f"{roofline.total_ms:.3f}"
        total["% of limit"] = f"{100 * roofline.total_ms / speed.total.p50:.1f}"
    return render([*rows, total])


def decoding_table(decodings: Sequence[Decoding]) -> str:
    """How each method decoded, and how far its actions are from plain decoding's."""
    return render(
        [
            {
                "decoding": one.name,
                "passes": f"{one.passes:.2f}" if one.passes else "-",  # not every engine tells
                "committed": f"{one.committed:.2f}" if one.passes else "-",
                "relaxed %": f"{100 * one.relaxed_share:.1f}",
                "equal %": f"{100 * one.equal_actions:.1f}",
                "bins mean": f"{one.mean_bins:.2f}",
                "bins max": str(one.max_bins),
                "mm": f"{one.mean_mm:.3f}",
                "deg": f"{one.mean_deg:.3f}",
            }
            for one in decodings
        ]
    )


def position_table(decodings: Sequence[Decoding]) -> str:
    """Share of accepted drafts at each token of an action, and committed length by pass."""
    return _two_series(
        decodings,
        "drafted % at token / committed in pass",
        lambda one: {
            f"t{at}": f"{100 * share:.0f}" for at, share in enumerate(one.drafted_by_position, 1)
        },
        lambda one: {
            f"pass {at}": f"{length:.2f}" for at, length in enumerate(one.committed_by_pass, 1)
        },
    )


def length_table(decodings: Sequence[Decoding]) -> str:
    """Accepted lengths of the passes that had guesses, and committed length by where they start.

    As Spec-VLA's Tables 2 and 3 count for its own loop (`spec-vla-published`). Its Table 3 leaves
    the bonus out, so it is less by one, and its position p is token t(p+2) here.
    """
    return _two_series(
        decodings,
        "% of drafted passes that accept n / committed from token",
        lambda one: {f"n={n}": f"{100 * share:.1f}" for n, share in enumerate(one.accepted_shares)},
        lambda one: {
            f"t{at}": f"{length:.2f}" if length else ""
            for at, length in enumerate(one.committed_by_start, 1)
        },
    )


def batch_table(speeds: Sequence[Speed], baseline: str) -> str:
    """Actions per second by batch size, and how many times those of the baseline at that size."""
    sizes = sorted({speed.batch_size for speed in speeds})
    if len(sizes) < 2:
        return ""
    plain, rows = dict[int, float](), dict[str, dict[str, str]]()
    for speed in speeds:
        if _alone(speed) == baseline:
            plain[speed.batch_size] = speed.actions_per_s
    for speed in speeds:
        size, rate = speed.batch_size, speed.actions_per_s
        first = {f"actions/s (x {baseline})": _alone(speed)}
        row = rows.setdefault(_alone(speed), first | {f"batch {one}": "" for one in sizes})
        ratio = f" ({rate / plain[size]:.2f})" if size in plain else ""
        row[f"batch {size}"] = f"{rate:.1f}{ratio}"
    return render(list(rows.values()))


def _alone(speed: Speed) -> str:
    """What a contender is called in a batch of one."""
    return speed.name.removesuffix(f" x{speed.batch_size}")


def _two_series(
    decodings: Sequence[Decoding],
    title: str,
    left: Callable[[Decoding], Mapping[str, str]],
    right: Callable[[Decoding], Mapping[str, str]],
) -> str:
    """Two series of cells side by side, a row per method, short ones filled up."""
    shown = [one for one in decodings if one.passes]
    every = {heading: "" for side in (left, right) for one in shown for heading in side(one)}
    return render([{title: one.name, **every, **left(one), **right(one)} for one in shown])


def _quantiles(times: Percentiles, digits: int) -> dict[str, str]:
    return {name: f"{getattr(times, name):.{digits}f}" for name in ("p50", "p95", "p99")}
