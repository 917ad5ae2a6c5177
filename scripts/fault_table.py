"""The fault table: runs every test that is marked with a class of faults, and prints what became of each class.

A variant has survived if its test passed: the fault ended in an error that names it or in a right result, adata was as
before and no file was lost. One that was skipped (an extra that is not installed) counts as neither.

    python scripts/fault_table.py [arguments of pytest]
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path

import pytest

LEAST_CLASSES, LEAST_VARIANTS = 83, 1
ROOT = Path(__file__).parents[1]


class Table:
    """Counts the outcomes of tests by the class in their mark."""

    def __init__(self) -> None:
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        for mark in item.iter_markers("fault"):
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[mark.args[0]][report.outcome] += 1
        return report

    def lines(self) -> list[str]:
        """The table as text: class, variants, survived, lost."""
        width = max(map(len, self.outcomes), default=5)
        lines = [f"{'class':{width}}  variants  survived  lost"]
        for name, count in sorted(self.outcomes.items(), key=lambda pair: pair[0].lower()):
            tried = count["passed"] + count["failed"]
            lines.append(f"{name:{width}}  {tried:8}  {count['passed']:8}  {count['failed']:4}")
        return lines

    def total(self) -> tuple[int, int, int, list[str]]:
        """Classes, variants, lost, and the classes of too few variants."""
        tried = {name: count["passed"] + count["failed"] for name, count in self.outcomes.items()}
        lost = sum(count["failed"] for count in self.outcomes.values())
        return len(tried), sum(tried.values()), lost, sorted(name for name, n in tried.items() if n < LEAST_VARIANTS)


def main(arguments: list[str]) -> int:
    table = Table()
    status = pytest.main([*(arguments or [str(ROOT / "tests")]), "-m", "fault", "-q", "-W", "ignore"], plugins=[table])
    print("\n".join(table.lines()))
    classes, variants, lost, few = table.total()
    print(f"{classes} classes, {variants} variants, {variants - lost} survived, lost = {lost}")
    if few:
        print(f"fewer than {LEAST_VARIANTS} variants: {', '.join(few)}")
    if classes < LEAST_CLASSES:
        print(f"fewer than {LEAST_CLASSES} classes")
    return int(bool(status or lost or few or classes < LEAST_CLASSES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
