"""What the pages point to is there."""

import re
from pathlib import Path

import pytest

from paceline.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md"))
    if page.name != "CHANGELOG.md"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_commands_and_files_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
        assert (page.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    modules = re.findall(r"python -m (benchmarks\.\w+)", text)
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in modules)
    commands = set(
        re.findall(r"(?:`|^)(?:\.venv/bin/)?paceline ([a-z][a-z-]*)", text, re.MULTILINE)
    )
    assert commands <= set(COMMANDS)
