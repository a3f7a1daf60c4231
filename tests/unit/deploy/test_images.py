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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_front_image_serves_without_torch(tmp_path: Path) -> None:
    """The same steps as in the Dockerfile, in a clean environment."""
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
    install = [tmp_path / "install.sh", "front", wheels, share]
    subprocess.run(install, env=inside, check=True, stdout=subprocess.DEVNULL)

    packages = (share / "packages.txt").read_text()
    assert "paceline" in packages and "torch" not in packages
    for command, expected in (
        (["paceline", "gateway", "--help"], "--router"),
        (["paceline", "router", "--help"], "--queue-limit"),
        (["hf", "download", "--help"], "--include"),  # what model.fetch runs
    ):
        done = subprocess.run(command, env=inside, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and expected in done.stdout, done.stderr
    code = "import paceline.gateway.main, paceline.router.main, sys; print('torch' in sys.modules)"
    done = subprocess.run(["python", "-c", code], env=inside, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_label_leads_to_the_list_of_packages() -> None:
    (labelled,) = re.findall(r'paceline.packages="(.+)"', DOCKERFILE)
    for target in TARGETS:
        assert f"/wheels {Path(labelled).parent}" in stage(target)
    assert Path(labelled).name in (DOCKER / "install.sh").read_text()
