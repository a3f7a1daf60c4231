"""The Helm chart: how much of what it renders a cluster, an upgrade or a service would refuse.

Every example and the defaults, against the schemas of every Kubernetes from 1.28 on.
"""

import sys
import time
from pathlib import Path

import helm_python as helm

from benchmarks import chart_objects
from benchmarks.chart_objects import CHART, EXAMPLES
from benchmarks.common import Figures, Options, publish, show


def measure(options: Options) -> Figures:
    versions = chart_objects.kubernetes_versions()
    if options.quick:
        versions = [versions[0], versions[-1]]
    started = time.perf_counter()
    rendered = [chart_objects.render(), *map(render_example, EXAMPLES)]
    objects = [item for one in rendered for item in one]
    invalid = chart_objects.problems(objects, versions)
    complaints = lint(versions)
    changed = chart_objects.upgrade_changes()
    for problem in (*invalid, *complaints, *changed):
        show(problem)
    return {
        "invalid_objects": len(invalid),
        "lint_complaints": len(complaints),
        "immutable_fields_changed": len(changed),
        "names_taken_twice": sum(len(chart_objects.names_taken_twice(one)) for one in rendered),
        "objects": len(objects),
        "kubernetes_versions": len(versions),
        "seconds": time.perf_counter() - started,
    }


def render_example(path: Path) -> list[chart_objects.Object]:
    show(f"rendering {path.name}")
    return chart_objects.render(chart_objects.example(path))


def lint(versions: list[str]) -> list[str]:
    """What Helm says of the chart, for each version; an icon is a matter of taste."""
    found = []
    for version in versions:
        for path in (None, *EXAMPLES):
            values = chart_objects.example(path) if path else {}
            report = helm.lint(str(CHART), values, strict=True, kube_version=f"v{version}")
            texts = [message["error"] for message in report["messages"]]
            found += [f"{version}: {text}" for text in texts if "icon" not in text]
            found += [f"{version}: {text}" for text in report["errors"]]
    return found


def main() -> int:
    return publish("chart", measure)


if __name__ == "__main__":
    sys.exit(main())
