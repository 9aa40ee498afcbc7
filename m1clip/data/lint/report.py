"""What lint found, for a person and for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "problem"]
_ORDER = {"problem": 0, "warning": 1, "info": 2}
_VERDICT = {"problem": "problems", "warning": "warnings", "info": "ok"}
KEPT_EXAMPLES = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of thing: how many, where the first of them are, and what to do."""

    code: str
    severity: Severity
    count: int
    message: str
    remedy: str = ""
    examples: tuple[str, ...] = ()


def finding(code: str, severity: Severity, message: str, remedy: str, places: Sequence[str]) -> list[Finding]:
    """A finding of these places, or none where there are none."""
    if not places:
        return []
    return [Finding(code, severity, len(places), message, remedy, tuple(places[:KEPT_EXAMPLES]))]


@dataclass(frozen=True)
class LintReport:
    """Findings, the worst first, and the counts a person wants to see of a set."""

    source: str
    images: dict[str, int]
    captions: int
    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    looked_at: int = 0

    def __post_init__(self) -> None:
        worst_first = sorted(self.findings, key=lambda f: _ORDER[f.severity])
        object.__setattr__(self, "findings", tuple(worst_first))

    @property
    def verdict(self) -> str:
        """ok, warnings or problems."""
        return _VERDICT[self.findings[0].severity] if self.findings else "ok"

    def advice(self) -> list[str]:
        """What to do, each thing once, the most pressing first; mere information asks for nothing."""
        return list(dict.fromkeys(f.remedy for f in self.findings if f.remedy and f.severity != "info"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"verdict": self.verdict, "advice": self.advice(), **asdict(self)}

    def to_json(self) -> str:
        """The whole report; each finding holds at most KEPT_EXAMPLES places beside its count."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_text(self, examples: int = 3) -> str:
        """Lines for a terminal, with a few examples of each finding."""
        total = sum(self.images.values())
        splits = ", ".join(f"{name} {count:,}" for name, count in self.images.items())
        looked = "all looked at" if self.looked_at == total else f"{self.looked_at:,} looked at"
        head = f"{self.source}: {total:,} images ({splits}), {self.captions:,} captions"
        lines = [f"{head}; {looked}, {self.seconds:.1f} s"]
        lines += [f"  {name.replace('_', ' ')}: {_plain(value)}" for name, value in self.facts.items()]
        lines += [f"  note: {note}" for note in self.notes]
        for found in self.findings:
            lines.append(f"{found.severity:>7}  {found.count:,} {found.message}")
            lines += [f"           {example}" for example in found.examples[:examples]]
            if found.examples and found.count > examples:
                lines.append(f"           ... and {found.count - min(examples, len(found.examples)):,} more")
        lines.append(f"verdict: {self.verdict}")
        lines += [f"  - {remedy}" for remedy in self.advice()]
        return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
