"""What lint found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["problem", "warning", "info"]
_VERDICT: dict[Severity, str] = {"problem": "problems", "warning": "warnings", "info": "ok"}  # worst first
MAX_EXAMPLES = 100  # of each finding in the JSON
EXAMPLES_SHOWN = 3  # of each finding in the text


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of finding: what was counted, how many, where the first ones are, and what to do."""

    code: str
    severity: Severity
    count: int
    message: str
    remedy: str = ""
    examples: tuple[str, ...] = ()


def finding(code: str, severity: Severity, message: str, remedy: str, places: Sequence[str]) -> list[Finding]:
    """A finding at these places; none without a place."""
    if not places:
        return []
    return [Finding(code, severity, len(places), message, remedy, tuple(places[:MAX_EXAMPLES]))]


@dataclass(frozen=True)
class LintReport:
    """Findings, the worst first, and statistics of the dataset."""

    source: str
    images: dict[str, int]  # of each split
    captions: int
    checked: int  # images that were decoded
    seconds: float
    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        worst_first = sorted(self.findings, key=lambda found: list(_VERDICT).index(found.severity))
        object.__setattr__(self, "findings", tuple(worst_first))

    @property
    def verdict(self) -> str:
        """ok, warnings or problems."""
        return _VERDICT[self.findings[0].severity] if self.findings else "ok"

    def advice(self) -> list[str]:
        """What to do, each remedy once, the most urgent first."""
        return list(dict.fromkeys(f.remedy for f in self.findings if f.remedy and f.severity != "info"))

    def to_json(self) -> str:
        """The complete report."""
        report = {"verdict": self.verdict, "advice": self.advice(), **asdict(self)}
        return json.dumps(report, indent=2, ensure_ascii=False)

    def to_text(self) -> str:
        """Lines for a terminal, with a few examples of each finding."""
        total = sum(self.images.values())
        splits = ", ".join(f"{name} {count:,}" for name, count in self.images.items())
        checked = "all" if self.checked == total else f"{self.checked:,}"
        head = f"{self.source}: {total:,} images ({splits}), {self.captions:,} captions"
        lines = [f"{head}; {checked} checked in {self.seconds:.1f} s"]
        for name, values in self.facts.items():
            shown = ", ".join(f"{key} {value:,}" for key, value in values.items())
            lines.append(f"  {name.replace('_', ' ')}: {shown}")
        lines += [f"  note: {note}" for note in self.notes]
        for found in self.findings:
            lines.append(f"{found.severity:>7}  {found.message}: {found.count:,}")
            shown_examples = found.examples[:EXAMPLES_SHOWN]
            lines += [f"           {example}" for example in shown_examples]
            if shown_examples and found.count > len(shown_examples):
                lines.append(f"           ... and {found.count - len(shown_examples):,} more")
        return "\n".join([*lines, f"verdict: {self.verdict}", *(f"  - {remedy}" for remedy in self.advice())])
