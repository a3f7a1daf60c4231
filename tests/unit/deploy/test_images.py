"""The container images: what the Dockerfile says, and its install steps run without an engine."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

import paceline
from benchmarks.chart_objects import CHART, ROOT

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
TARGETS = ("front", "cpu", "cuda")


def stage(target: str) -> str:
    """The lines of a stage, without its FROM."""
    found = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert found is not None
    return found[1]


def test_a_linter_of_dockerfiles_finds_nothing() -> None:
    own = Path(sys.executable).parent
    hadolint = shutil.which("hadolint", path=f"{own}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint comes with `make venv`")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_installs_and_ends_as_the_charts_user(target: str) -> None:
    lines = stage(target).strip().splitlines()
    assert lines[-1] == "USER 10001"  # what the chart's runAsUser says
    assert f"/build/install.sh {target} /wheels" in stage(target)
    assert "runAsUser: 10001" in (CHART / "templates" / "_helpers.tpl").read_text()


def test_every_base_can_be_pinned_by_an_argument() -> None:
    bases = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M))
    assert bases == {"${PYTHON_IMAGE}", "base"}


def test_versions_of_chart_image_and_package_are_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (package,) = re.findall(
        r'__version__ = "(.+)"', (ROOT / "src/paceline/__init__.py").read_text()
    )
    (image,) = re.findall(r"^ARG VERSION=(.+)$", DOCKERFILE, re.M)
    assert chart["appVersion"] == image == paceline.__version__


def test_no_engine_is_said_plainly(tmp_path: Path) -> None:
    for tool in ("bash", "env", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [ROOT / "scripts" / "images.sh", "paceline"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: no engine answers")


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [DOCKER / "install.sh", "gpu", tmp_path, tmp_path], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        "install.sh: no target gpu: front, cpu or cuda\n",
    )


ENGINE = """#!/bin/sh
printf '%s\\n' "$@" >> "$CALLS"
"""


def calls_of_an_engine(tmp_path: Path, **environment: str) -> list[str]:
    """What scripts/images.sh asks of docker."""
    (tmp_path / "docker").write_text(ENGINE)
    (tmp_path / "docker").chmod(0o755)
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    calls = {"CALLS": str(tmp_path / "calls")}
    command = [ROOT / "scripts" / "images.sh", "registry.example/paceline"]
    subprocess.run(command, env={**os.environ, **paths, **calls, **environment}, check=True)
    return (tmp_path / "calls").read_text().splitlines()


def test_three_images_are_built_from_the_base_that_is_pinned(tmp_path: Path) -> None:
    base = "python:3.11-slim@sha256:" + "0" * 64
    said = calls_of_an_engine(tmp_path, PYTHON_IMAGE=base)
    assert said.count("build") == 3 and said.count(f"PYTHON_IMAGE={base}") == 3
    assert [tag for tag in said if "registry.example" in tag] == [
        f"registry.example/paceline:{paceline.__version__}-{target}" for target in TARGETS
    ]


def test_several_architectures_are_built_at_once_with_a_list_of_what_is_in_them(
    tmp_path: Path,
) -> None:
    said = calls_of_an_engine(tmp_path, PLATFORMS="linux/amd64,linux/arm64", PUSH="1")
    assert said.count("buildx") == said.count("--sbom=true") == said.count("--push") == 3
    assert said.count("linux/amd64,linux/arm64") == 3


def installed(target: str, tmp_path: Path) -> tuple[dict[str, str], str]:
    """The same steps as in the Dockerfile, in a clean environment: its variables, its packages."""
    wheels, share, home = tmp_path / "wheels", tmp_path / "share", tmp_path / "venv"
    (tmp_path / "build.cfg").write_text(f"[build]\nbuild_base = {tmp_path / 'build'}\n")
    build = {**os.environ, "DIST_EXTRA_CONFIG": str(tmp_path / "build.cfg")}
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels, ROOT]
    subprocess.run(wheel, env=build, check=True)
    venv.create(home, with_pip=True)
    for name in ("install.sh", "constraints.txt"):  # as they are mounted in the build
        source = ROOT / "constraints.txt" if name == "constraints.txt" else DOCKER / name
        shutil.copy(source, tmp_path / name)
    inside = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    inside.pop("PYTHONPATH", None)
    install = [tmp_path / "install.sh", target, wheels, share]
    subprocess.run(install, env=inside, check=True, stdout=subprocess.DEVNULL)
    return inside, (share / "packages.txt").read_text()


def says(inside: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=inside, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_front_image_serves_without_torch(tmp_path: Path) -> None:
    inside, packages = installed("front", tmp_path)
    assert "paceline" in packages and "torch" not in packages
    for command, expected in (
        (["paceline", "gateway", "--help"], "--router"),
        (["paceline", "router", "--help"], "--queue-limit"),
        (["hf", "download", "--help"], "--include"),  # what model.fetch runs
    ):
        assert expected in says(inside, *command)
    code = "import paceline.gateway.main, paceline.router.main, sys; print('torch' in sys.modules)"
    assert says(inside, "python", "-c", code) == "False\n"
    assert says(inside, "python", "-m", "pip", "check").startswith("No broken")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_cpu_image_computes_and_reaches_every_transport_of_hosts(tmp_path: Path) -> None:
    inside, packages = installed("cpu", tmp_path)
    assert "torch==" in packages and "nixl" in packages and "boto3" in packages
    for role in ("prefill", "decode"):
        assert "--pool-mib" in says(inside, "paceline", role, "--help")
    code = "import paceline.worker.rank_main, torch; print(torch.zeros(2).sum().item())"
    assert says(inside, "python", "-c", code) == "0.0\n"
    problem = "from paceline.kv_transfer import registry; print(registry.problem_of('{}'))"
    for transport in ("tcp", "shm", "nixl"):
        assert says(inside, "python", "-c", problem.format(transport)) == "\n", transport


def test_the_label_leads_to_the_list_of_packages() -> None:
    (labelled,) = re.findall(r'paceline.packages="(.+)"', DOCKERFILE)
    for target in TARGETS:
        assert f"/wheels {Path(labelled).parent}" in stage(target)
    assert Path(labelled).name in (DOCKER / "install.sh").read_text()
