"""The Helm chart, rendered by Helm's own engine and judged: what benchmarks.chart and tests ask.

Objects are judged against the schemas of every Kubernetes that the chart supports, custom ones
against those kept in tests/unit/deploy/schemas. `lookup` finds nothing: no cluster is asked.
"""

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "paceline"
EXAMPLES = sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))
CUSTOM_SCHEMAS = ROOT / "tests" / "unit" / "deploy" / "schemas"
OLDEST_MINOR = 28
RELEASE, NAMESPACE = "demo", "serving"
# What Kubernetes refuses to change in an object that exists.
IMMUTABLE = {
    "Deployment": (("spec", "selector"),),
    "StatefulSet": (
        ("spec", "selector"),
        ("spec", "serviceName"),
        ("spec", "podManagementPolicy"),
        ("spec", "volumeClaimTemplates"),
    ),
    "Service": (("spec", "clusterIP"),),
    "Secret": (("type",),),
}
Object = dict[str, Any]
Values = dict[str, Any]


@functools.cache
def chart(path: Path = CHART) -> helm.Chart:
    return helm.Chart.load(str(path))


def render(values: Values | None = None, path: Path = CHART) -> list[Object]:
    """As `helm install demo --namespace serving`. Raises HelmValuesError, HelmRenderError."""
    loaded = chart(path)
    given = values or {}
    loaded.validate_schema(loaded.merge_values(given))
    files = loaded.render(given, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def example(path: Path) -> Values:
    values: Values = yaml.safe_load(path.read_text())
    return values


def kubernetes_versions() -> list[str]:
    """1.28 and newer, as far as schemas are installed."""
    versions = dict.fromkeys(utils.all_versions())  # in order; each is listed twice
    return [v for v in versions if int(v.split(".")[1]) >= OLDEST_MINOR]


def problem_of(found: Object, version: str) -> str:
    """Why a Kubernetes of this version would refuse the object; empty: it would not."""
    kept = CUSTOM_SCHEMAS / f"{found['kind'].lower()}.json"
    if kept.exists():
        validator = _custom_validator(kept, version)
    else:
        validator = _validator(version, found["kind"], found["apiVersion"])
    error = jsonschema.exceptions.best_match(validator.iter_errors(found))
    where = f"{found['kind']} {found['metadata']['name']} ({version})"
    return f"{where}: {error.json_path}: {error.message[:300]}" if error else ""


@functools.cache
def _custom_validator(path: Path, version: str) -> Draft202012Validator:
    """Pod templates in custom objects are those of the version."""
    return Draft202012Validator(json.loads(path.read_text()), registry=_definitions(version))


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    """What kubernetes_validate does for one object, with its large files read once a version."""
    group, _, number = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    schema = utils.schema_contents(f"{_folder(version)}/{name}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    contents = utils.schema_contents(f"{_folder(version)}/_definitions.json", version)
    return Resource.from_contents(contents) @ Registry()


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}-local-strict"


def problems(objects: Iterable[Object], versions: Iterable[str]) -> list[str]:
    listed = list(objects)
    found = [problem_of(item, version) for version in versions for item in listed]
    return [problem for problem in found if problem]


def names_taken_twice(objects: Iterable[Object]) -> set[tuple[str, str]]:
    seen: set[tuple[str, str]] = set()
    twice: set[tuple[str, str]] = set()
    for item in objects:
        name = item["kind"], item["metadata"]["name"]
        (twice if name in seen else seen).add(name)
    return twice


def changed_immutables(before: Iterable[Object], after: Iterable[Object]) -> list[str]:
    """Fields of objects in both that an upgrade may not change, and does."""
    old = {(item["kind"], item["metadata"]["name"]): item for item in before}
    changed = []
    for item in after:
        name = item["kind"], item["metadata"]["name"]
        for path in IMMUTABLE.get(item["kind"], ()) if name in old else ():
            if _at(old[name], path) != _at(item, path):
                changed.append(f"{name[0]} {name[1]}: {'.'.join(path)}")
    return changed


def _at(found: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def pod_templates(objects: Iterable[Object]) -> Iterator[tuple[str, Object]]:
    """Name of the owner and its pod template, of which a group has two."""
    for item in objects:
        name = item["metadata"]["name"]
        if item["kind"] in ("Deployment", "StatefulSet"):
            yield name, item["spec"]["template"]
        elif item["kind"] == "LeaderWorkerSet":
            parts = item["spec"]["leaderWorkerTemplate"]
            yield name, parts["leaderTemplate"]
            yield name, parts["workerTemplate"]


def golden(objects: Iterable[Object]) -> str:
    """Sorted, without what differs from run to run and what others write: alerts, dashboards."""
    kept = [item for item in objects if not _is_of_files(item)]
    listed = sorted(kept, key=lambda item: (item["kind"], item["metadata"]["name"]))
    for item in listed:
        if item["kind"] == "Secret":
            item["data"] = dict.fromkeys(item["data"], "made at install")
    return yaml.dump_all(listed, Dumper=yaml.CSafeDumper, sort_keys=True, width=100)


def _is_of_files(item: Object) -> bool:
    """Made from the chart's folder `files`."""
    is_dashboard = "grafana_dashboard" in item["metadata"].get("labels", {})
    return is_dashboard or item["kind"] == "PrometheusRule"


def chart_of(commit: str, folder: Path) -> Path | None:
    """The chart as it was in a commit, written into `folder` with the examples beside it; None if
    it was not there."""
    path = CHART.relative_to(ROOT)
    command = ["git", "archive", "--format=tar", commit, str(path.parent)]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True)
    if archive.returncode:
        return None
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / path


def commit_before() -> str:
    """The last commit with another chart than the working tree's; empty where git knows none."""
    path = str(CHART.relative_to(ROOT))
    if _git("status", "--porcelain", "--", path):
        return "HEAD"
    last = _git("log", "-1", "--format=%H", "--", path)
    return f"{last}~1" if last else ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def upgrade_changes() -> list[str]:
    """Immutable fields that an upgrade from the chart before would change, with defaults or as in
    an example of that time."""
    with tempfile.TemporaryDirectory() as folder:
        old = chart_of(commit_before(), Path(folder))
        if old is None:
            return []
        changed = changed_immutables(render(path=old), render())
        for path in sorted((old.parent / "examples").glob("*.yaml")):
            values = example(path)
            found = changed_immutables(render(values, old), render(values))
            changed += [f"{path.stem}: {field}" for field in found]
        return changed
