"""The documentation site: it builds without a warning, holds every page and every public name, and links hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import armature

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))


def build(checkout: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    options = ["--fresh-env", "--fail-on-warning", "--keep-going", "--quiet"]
    command = [Path(sys.executable).parent / "sphinx-build", *options, checkout / "docs", out]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_site_has_every_page_and_public_name(tmp_path: Path) -> None:
    assert build(ROOT, tmp_path).returncode == 0
    assert [page for page in PAGES if not (tmp_path / page.with_suffix(".html")).is_file()] == []
    inventory = InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="")
    assert set(armature.__all__) <= {
        name.removeprefix("armature.") for kind in inventory.data.values() for name in kind
    }


@pytest.mark.slow
def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    """To a page, to a file of the code and to a heading."""
    broken = ["gone.md", "../components/gone.py", "quickstart.md#no-such-heading"]
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in ROOT.iterdir():
        if path.name != "docs":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "docs/index.md").write_text("# Start\n\n" + "\n\n".join(f"[gone]({link})" for link in broken) + "\n")
    (tmp_path / "docs/conf.py").write_text(
        (ROOT / "docs/conf.py").read_text() + 'suppress_warnings = ["toc.not_included"]\n'
        'exclude_patterns = ["conf.py", "reference.md"]\n'
    )
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for output in ("gone.md", "gone.py", "no-such-heading"):
        assert output in done.stderr, done.stderr
