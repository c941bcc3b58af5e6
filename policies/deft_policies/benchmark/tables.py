"""Tables of a benchmark as text that is also Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from deft_core.measures.speculation import Speculation
from deft_core.measures.speed import SpeedUp
from deft_core.measures.statistics import Percentiles
from deft_core.measures.table import NOTHING, Column, column_table, markdown_table, share_text
from deft_policies.benchmark.audit import (
    AuditReport,
    EqualityCheck,
    describe,
    describe_equality,
)
from deft_policies.benchmark.roofline import DeviceRates, Roofline
from deft_policies.benchmark.summary import STAGES, Decoding, Speed
from deft_policies.decoding.methods import AUTOREGRESSIVE

_LIMITS = """

- limit: what the stage must read and compute at least, at this device's measured rates
- GB/s, TFLOP/s: what it read and computed in the p50"""
_POSITIONS = """

- n=2: share of the drafted passes that accepted two drafts
- t3: committed length of the passes whose first draft is for the answer's third token"""
_SHARES = """

- t3: share of the answers whose third token was an accepted draft, in percent
- pass 2: committed length of the second pass"""
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
    frames: str = ""  # where they come from, in a sentence
    num_asked: int = 0  # frames that were to be answered; more than were where it was interrupted

    @property
    def is_interrupted(self) -> bool:
        """Whether it has fewer frames than it was to have."""
        return self.num_asked > max((speed.num_answers for speed in self.speeds), default=0)

    @property
    def has_faults(self) -> bool:
        """Whether an audit was asked for and found answers that must not be."""
        audited = self.audit is not None and bool(self.audit.faults)
        return audited or any(check.is_broken for check in self.equality)

    def render(self, has_stages: bool = False) -> str:
        """Tables and verdicts, as text that is also Markdown."""
        parts = [
            self._frames(),
            first_table(self),
            plans_used(self.decodings),
            batch_table(self.speeds, AUTOREGRESSIVE),
            *(self._details() if has_stages else ()),
            "Of: " + "; ".join(f"{name} {value}" for name, value in self.details.items()),
        ]
        if self.audit is not None:
            parts.append(describe(self.audit))
        parts += [describe_equality(check) for check in self.equality]
        return "\n\n".join(part.rstrip() for part in parts if part)

    def _frames(self) -> str:
        """What was answered, before any number of it."""
        if not self.is_interrupted:
            return self.frames
        done = max(speed.num_answers for speed in self.speeds)
        return f"{self.frames}\nInterrupted: {done} of {self.num_asked} frames.".strip()

    def _details(self) -> list[str]:
        """Stages compared with the device's limits, and lengths by position."""
        parts = [time_table(self.speeds)]
        tables = zip_longest(self.speeds, self.rooflines)
        parts += [stage_table(speed, roofline) for speed, roofline in tables]
        if self.rates is not None:
            parts.append(_say_rates(self.rates))
        parts.append(
            "\n".join(
                f"{decoding.name}: {decoding.rule}" for decoding in self.decodings if decoding.rule
            )
        )
        speculations = {
            decoding.name: decoding.speculation
            for decoding in self.decodings
            if decoding.speculation
        }
        longest = max(
            (len(speculation.drafted_by_token) for speculation in speculations.values()), default=0
        )
        if 0 < longest <= _MOST_POSITIONS:
            parts += [length_table(speculations), position_table(speculations)]
        return parts


def _say_rates(rates: DeviceRates) -> str:
    return (
        f"limits: {rates.description} copies {rates.bytes_per_s / 1e9:.1f} GB/s and multiplies "
        f"{rates.flops_per_s / 1e12:.3f} TFLOP/s, measured now; a model that fits into the "
        "processor's cache may read faster than that"
    )


@dataclass(frozen=True)
class BenchRow:
    """A contender's numbers, and its speed-up over the baseline where it has one."""

    speed: Speed
    decoding: Decoding | None
    faster: SpeedUp | None


def _of_passes(text: Callable[[Speculation], str]) -> Callable[[BenchRow], str]:
    """Nothing where its engine counts no passes."""

    def cell(row: BenchRow) -> str:
        speculation = row.decoding and row.decoding.speculation
        return text(speculation) if speculation else NOTHING

    return cell


def _of_others(text: Callable[[Decoding], str]) -> Callable[[BenchRow], str]:
    """Numbers that only a method with other answers has."""

    def cell(row: BenchRow) -> str:
        decoding = row.decoding
        return (
            text(decoding)
            if decoding and decoding.speculation and decoding.equal_actions < 1
            else NOTHING
        )

    return cell


def _actions_per_s(row: BenchRow) -> str:
    is_single = row.speed.batch_size * row.speed.chunk_length == 1
    return NOTHING if is_single else f"{row.speed.actions_per_s:.1f}"


def _times(row: BenchRow) -> str:
    """`1.31 (1.20 to 1.42)`, or `1.31 ?` where that does not hold beyond these frames."""
    if row.faster is None:
        return NOTHING
    if row.faster.doubts:
        return f"{row.faster.times:.2f} ?"
    return f"{row.faster.times:.2f} ({row.faster.interval:.2f})"


def _columns(baseline: str | None) -> list[Column[BenchRow]]:
    return [
        Column("method", lambda row: row.speed.name),
        Column(
            "ms",
            lambda row: f"{row.speed.total.mean:.1f}",
            "one call, frame in, action out, mean over the same frames",
        ),
        Column(
            "actions/s",
            _actions_per_s,
            "of the whole batch, if all actions of a chunk are executed",
        ),
        Column(
            "times as fast (95%)",
            _times,
            f"milliseconds of {baseline} over the method's, with the interval over episodes",
        ),
        Column(
            "passes",
            _of_passes(lambda row: f"{row.passes_per_action:.2f}"),
            "runs of the model for an answer, the prefill included",
        ),
        Column(
            "committed",
            _of_passes(lambda row: f"{row.committed_length:.2f}" if row.num_checked else NOTHING),
            "tokens that a pass with drafts settles: the accepted ones and one more",
        ),
        Column(
            "equal answers",
            lambda row: NOTHING if not row.decoding else share_text(row.decoding.equal_actions),
            "answers with all tokens of plain decoding's",
        ),
        Column(
            "relaxed",
            _of_others(lambda row: f"{row.relaxed_share:.1%}"),
            "executed tokens that are not the model's greedy choice",
        ),
        Column(
            "bins: mean, most",
            _of_others(lambda row: f"{row.mean_bins:.2f}, {row.max_bins}"),
            "how far an action's tokens are from plain decoding's to the same frame; more than the "
            "rule's limit is usual, because tokens after an accepted draft follow from that draft",
        ),
        Column(
            "mm, degrees",
            _of_others(lambda row: f"{row.mean_mm:.2f}, {row.mean_deg:.2f}"),
            "the same in robot units, mean over motions",
        ),
    ]


def first_table(report: Report) -> str:
    """What one asks first: how fast each method is, and whether its answers are the same."""
    plain = next((speed for speed in report.speeds if speed.name == report.baseline), None)
    rows = [
        BenchRow(speed, decoding, None if plain in (None, speed) else speed.faster_than(plain))
        for speed, decoding in zip_longest(report.speeds, report.decodings)
    ]
    doubts = dict.fromkeys(doubt for row in rows if row.faster for doubt in row.faster.doubts)
    notes = []
    if doubts:
        notes.append(f"?: of these frames alone, and no speed-up to quote: {'; '.join(doubts)}.")
    for decoding in report.decodings:
        if decoding.rule and not (
            decoding.speculation and any(decoding.speculation.drafted_by_token)
        ):
            notes.append(f"{decoding.name}: nothing was drafted in any pass")
    table = column_table(_columns(report.baseline), rows, aligned=True)
    return "\n".join([table, *notes])


def plans_used(decodings: Sequence[Decoding]) -> str:
    """Which plans made a method's drafts, how often, and what each of them is."""
    lines, meanings = [], dict[str, str]()
    for decoding in decodings:
        total = sum(decoding.plans.values())
        shares = ", ".join(f"{name} {num / total:.0%}" for name, num in decoding.plans.items())
        if decoding.plan_meanings and decoding.rule:
            lines.append(f"{decoding.name} drafted by: {shares}")
            meanings |= decoding.plan_meanings
    return "\n".join([*lines, *(f"- {name} = {text}" for name, text in meanings.items())])


def render(rows: Sequence[Mapping[str, str]]) -> str:
    """A table whose columns are aligned. A row is its cells by heading; it may lack some."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [[row.get(heading, "") for heading in headings] for row in rows]
    return markdown_table(headings, cells, aligned=True).rstrip()


def time_table(speeds: Sequence[Speed]) -> str:
    """Quantiles of the time of an answer, a row for each contender."""
    columns = (
        Column[Speed]("ms per answer", lambda speed: speed.name),
        *(Column[Speed](name, _quantile(name)) for name in ("p50", "p95", "p99", "mean")),
        Column[Speed]("actions/s", lambda speed: f"{speed.actions_per_s:.1f}"),
    )
    return column_table(columns, speeds, aligned=True)


def _quantile(name: str) -> Callable[[Speed], str]:
    return lambda speed: f"{getattr(speed.total, name):.2f}"


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
    return render([*rows, total]) + (_LIMITS if roofline is not None else "")


def position_table(found: Mapping[str, Speculation]) -> str:
    """Share of accepted drafts at each token of an action, and committed length by pass."""
    return _two_series(
        found,
        "drafted % / committed",
        lambda one: {
            f"t{at}": f"{100 * share:.0f}" for at, share in enumerate(one.drafted_by_token, 1)
        },
        lambda one: {
            f"pass {at}": f"{length:.2f}" for at, length in enumerate(one.committed_by_pass, 1)
        },
        _SHARES,
    )


def length_table(found: Mapping[str, Speculation]) -> str:
    """Accepted lengths of the passes that had guesses, and committed length by where they start.

    As Spec-VLA's Tables 2 and 3 count for its own loop (`spec-vla-published`). Its Table 3 leaves
    the bonus out, so it is less by one, and its position p is token t(p+2) here.
    """
    return _two_series(
        found,
        "accepted n % / committed",
        lambda one: {
            f"n={n}": f"{100 * one.share_of_length(n):.1f}"
            for n in range(max(one.accepted_counts, default=-1) + 1)
        },
        _by_start,
        _POSITIONS,
    )


def _by_start(speculation: Speculation) -> dict[str, str]:
    means = {at: f"{mean:.2f}" for at, (mean, _) in speculation.committed_by_start.items()}
    return {f"t{at + 1}": means.get(at, "") for at in range(len(speculation.drafted_by_token))}


def batch_table(speeds: Sequence[Speed], baseline: str) -> str:
    """Actions per second by batch size, and how many times those of the baseline at that size."""
    rates = {(_alone(speed), speed.batch_size): speed.actions_per_s for speed in speeds}
    sizes = sorted({size for _, size in rates})
    if len(sizes) < 2:
        return ""

    def cell(name: str, size: int) -> str:
        rate, plain = rates.get((name, size)), rates.get((baseline, size))
        if rate is None:
            return ""
        return f"{rate:.1f} ({rate / plain:.2f})" if plain else f"{rate:.1f}"

    names = dict.fromkeys(name for name, _ in rates)
    title = f"actions/s (x {baseline})"
    return render([{title: name, **{f"batch {n}": cell(name, n) for n in sizes}} for name in names])


def _alone(speed: Speed) -> str:
    """What a contender is called in a batch of one."""
    return speed.name.removesuffix(f" x{speed.batch_size}")


def _two_series(
    found: Mapping[str, Speculation],
    title: str,
    left: Callable[[Speculation], Mapping[str, str]],
    right: Callable[[Speculation], Mapping[str, str]],
    meanings: str,
) -> str:
    """Two series of cells side by side, a row per method, short ones filled up."""
    blank_row = {
        heading: "" for side in (left, right) for one in found.values() for heading in side(one)
    }
    rows = [{title: name, **blank_row, **left(one), **right(one)} for name, one in found.items()]
    return render(rows) + meanings


def _quantiles(times: Percentiles, digits: int) -> dict[str, str]:
    return {name: f"{getattr(times, name):.{digits}f}" for name in ("p50", "p95", "p99")}
