"""The folders at the top are importable only as paceline.*, and the wheel is whole."""

import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import paceline

ROOT = Path(paceline.__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"
LINKS = sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink())


def test_every_top_level_package_is_linked() -> None:
    here = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert sorted(here) == LINKS


def test_links_are_relative_so_that_a_checkout_can_move() -> None:
    for name in LINKS:
        assert (PACKAGE / name).readlink() == Path("..") / ".." / name


def test_no_top_level_name_leaks_to_an_installed_program() -> None:
    code = "import importlib.util as u, sys; print([u.find_spec(name) for name in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *LINKS],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in done.stdout.replace(str(ROOT / ".venv"), "")


def test_every_module_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages(paceline.__path__, "paceline.")]
    assert len(names) > 50
    if importlib.util.find_spec("triton") is None:  # an extra; only kernels/gpu needs it
        names = [name for name in names if not name.startswith("paceline.kernels.gpu.")]
    for name in names:
        importlib.import_module(name)


def test_every_package_that_make_installs_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    makefile = (ROOT / "Makefile").read_text()
    (extras,) = re.findall(r"install.sh (\S+,dev)\n", makefile)
    needed = closure("paceline", frozenset(extras.split(",")))
    assert len(needed) > 50
    assert not needed - pinned - {"paceline"}


def closure(name: str, extras: frozenset[str]) -> set[str]:
    """All packages that installing this one brings, by what is installed here."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [(name, extras)]
    while todo:
        name, extras = todo.pop()
        if (canonicalize_name(name), extras) in found:
            continue
        found.add((canonicalize_name(name), extras))
        for text in metadata.distribution(name).requires or []:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in {"", *extras}):
                todo.append((one.name, frozenset(one.extras)))
    return {name for name, _ in found}


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_all_native_modules(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    (tmp_path / "build.cfg").write_text(f"[build]\nbuild_base = {tmp_path / 'build'}\n")
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(tmp_path / "build.cfg")}
    subprocess.run([*command, str(ROOT)], env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for package in LINKS:
        assert f"paceline/{package}/__init__.py" in names
    for native in (
        "paceline/core/_native.",
        "paceline/router/_native.",
        "paceline/kernels/_native.",
    ):
        assert any(name.startswith(native) and name.endswith(".so") for name in names)
    assert "paceline/py.typed" in names
    assert "paceline/v1/common_pb2.pyi" in names
