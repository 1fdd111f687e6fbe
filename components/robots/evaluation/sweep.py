"""The stage compare-policies: several policies played the same episodes of LIBERO, and are compared in pairs.

The p-values of the pairs are corrected for their number by Holm's method (S. Holm, "A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics 6, 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, StringConstraints

from armature.components.contracts.metrics import write_json
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.evaluation.wilson import Interval
from armature.components.robots.evaluation.compare import PairedComparison, compare_results
from armature.components.robots.evaluation.results import LiberoResult, by_suite, read_results, success_rate
from armature.components.robots.policies.settings import RobotPolicySettings

if TYPE_CHECKING:
    from armature.components.pages.report import HtmlReport

PolicyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,39}$")]
POLICIES_FILE, CHART_FILE = "policies.json", "policies.svg"


class PolicySweepSettings(Settings):
    """Policies that play the same episodes, by a name for tables and plots."""

    model_config = ConfigDict(title="Policies")

    policies: dict[PolicyName, RobotPolicySettings] = Field(min_length=2)
    """Settings of each policy, as in the section `policy` of another evaluation."""


class ComparePoliciesSettings(Settings):
    """Settings of the comparison of several evaluations."""

    policies: tuple[PolicyName, ...] = Field(min_length=2)
    """Names of the policies. Each is the name of an input, the policy's evaluation."""
    confidence: float = Field(0.95, gt=0.0, lt=1.0)
    """Confidence level of a significant difference."""


@dataclass(frozen=True)
class PolicyPair:
    """Two policies on the same episodes. `p_value` is McNemar's, corrected for the number of pairs."""

    first: str
    second: str
    comparison: PairedComparison
    p_value: float

    def numbers(self) -> dict[str, str | int | float]:
        """Return the names and numbers of the pair, as `policies.json` has them."""
        return {
            "first": self.first,
            "second": self.second,
            "difference": self.comparison.difference,
            "only_first": self.comparison.only_first,
            "only_second": self.comparison.only_second,
            "p_value": self.comparison.p_value,
            "p_value_corrected": self.p_value,
        }


def compare_pairs(results: Mapping[str, Sequence[LiberoResult]]) -> list[PolicyPair]:
    """Compare each pair of policies, in the order of their names in `results`.

    Raises:
        DataError: two policies did not play the same episodes from the same states.
    """
    names = list(combinations(results, 2))
    compared = [compare_results(results[first], results[second]) for first, second in names]
    corrected = holm([each.p_value for each in compared])
    return [PolicyPair(*pair, each, p) for pair, each, p in zip(names, compared, corrected, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that hold for all hypotheses together: the k-th smallest of n, times n - k, and monotone.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def interval_chart(rates: Mapping[str, Interval]) -> str:
    """Return an SVG with a bar for each success rate and a line for its interval."""
    left, width, row = 340, 400, 28
    height = row * len(rates) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 80} {height}" font-family="sans-serif" '
        f'font-size="13" role="img"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(0, 101, 25):
        x = left + width * tick / 100
        parts.append(f'<line x1="{x}" x2="{x}" y1="8" y2="{height - 28}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">{tick} %</text>')
    for i, (name, rate) in enumerate(rates.items()):
        y = 12 + row * i
        low, value, high = (left + width * each for each in (rate.low, rate.estimate, rate.high))
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{value - left:.1f}" height="18" fill="#7aa6d8"/>')
        parts.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 11}" y2="{y + 11}" stroke="#222" stroke-width="2"/>'
        )
        parts.append(f'<text x="{high + 6:.1f}" y="{y + 15}">{rate.estimate:.3f}</text>')
    return "".join([*parts, "</svg>"])


def compare_policies(
    settings: ComparePoliciesSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Compare several evaluations and write `policies.json`, `policies.svg` and `report.html`.

    Raises:
        DataError: an input is not a LIBERO evaluation, or two of them did not play the same episodes.
    """
    from armature.components.pages.report import write_report

    results = {name: read_results(inputs[name].path) for name in settings.policies}
    pairs = compare_pairs(results)
    rates = {name: success_rate(each) for name, each in results.items()}
    shown = {name: {"success": rate.estimate, "low": rate.low, "high": rate.high} for name, rate in rates.items()}
    write_json(out / POLICIES_FILE, {"policies": shown, "pairs": [pair.numbers() for pair in pairs]})
    (out / CHART_FILE).write_text(interval_chart(rates))
    write_report(out / "report.html", sweep_report(settings, results, pairs))
    return StageReport(rows={"policies": len(rates), "pairs": len(pairs)}, drops={})


def sweep_report(
    settings: ComparePoliciesSettings, results: Mapping[str, Sequence[LiberoResult]], pairs: Sequence[PolicyPair]
) -> HtmlReport:
    """Return the report: the plot, success by suite, and the pairs."""
    from armature.components.contracts.images import data_url
    from armature.components.pages.report import HtmlReport, ReportImage, Table

    suites = list(by_suite(results[settings.policies[0]]))
    rates = {name: success_rate(each) for name, each in results.items()}
    rows = [
        [name, *(str(success_rate(by_suite(each)[suite])) for suite in suites), str(rates[name])]
        for name, each in results.items()
    ]
    compared = [
        [*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in pair.numbers().values()), verdict]
        for pair in pairs
        for verdict in ["yes" if pair.p_value <= 1 - settings.confidence else "no"]
    ]
    columns = ["first", "second", "second - first", "only first", "only second", "p, McNemar", "p, Holm", "significant"]
    image = data_url(interval_chart(rates).encode(), "image/svg+xml")
    return HtmlReport(
        f"{len(rates)} policies in LIBERO",
        {"policies": str(len(rates)), "episodes of each": f"{len(results[settings.policies[0]]):,}"},
        {"JSON": POLICIES_FILE, "plot": CHART_FILE},
        images=[ReportImage("success, 95 % interval", image, ", ".join(rates))],
        tables=[
            Table("Success, 95 % interval", ["policy", *suites, "all"], rows),
            Table("Pairs of policies on the same episodes", columns, compared),
        ],
        configuration=settings.model_dump(mode="json"),
    )


COMPARE_POLICIES_STAGE = Stage(
    "compare-policies",
    1,
    ComparePoliciesSettings,
    (),
    compare_policies,
    more_inputs=lambda settings: settings.policies,
)
