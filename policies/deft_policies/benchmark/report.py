"""What a benchmark found, and its text."""

from collections.abc import Mapping
from dataclasses import dataclass

from deft_policies.benchmark.audit import AuditReport, describe
from deft_policies.benchmark.device import DeviceRates
from deft_policies.benchmark.roofline import Roofline
from deft_policies.benchmark.summary import Decoding, Speed
from deft_policies.benchmark.tables import (
    decoding_table,
    length_table,
    position_table,
    speed_table,
    stage_table,
)

_DECODING_TABLES = (decoding_table, length_table, position_table)


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
            parts += [table(self.decodings) for table in _DECODING_TABLES]
        if self.audit is not None:
            parts.append(describe(self.audit))
        return "\n\n".join(parts)


def _say_rates(rates: DeviceRates) -> str:
    return (
        f"limits: {rates.description} copies {rates.bytes_per_s / 1e9:.1f} GB/s and multiplies "
        f"{rates.flops_per_s / 1e12:.3f} TFLOP/s, measured now; a model that fits into the "
        "processor's cache may read faster than that"
    )
