"""The package as a wheel, installed and used outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import QUIET, ROOT, TRAINING, run


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installation")
    source, wheels, site = folder / "source", folder / "wheels", folder / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("fairseq_plugins", "user_dir"):
        shutil.copytree(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, *wheels.glob("*.whl")], check=True)
    shutil.rmtree(source)
    return site


def test_nothing_is_left_out(site: Path) -> None:
    inside, installed = (
        {path.relative_to(folder) for path in (*folder.rglob("*.py"), *folder.glob("cli/serve/page/*"))}
        for folder in (ROOT / "fairseq_plugins", site / "fairseq_plugins")
    )
    assert inside == installed


def test_trains_from_a_wheel(site: Path, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", site / "bin" / "fairseq-plugins", "user-dir"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    user_dir = Path(shown.stdout.strip())
    assert user_dir == site / "fairseq_plugins_user_dir"
    training = [*TRAINING, *QUIET, "--max-update", 1, "--save-dir", "save", "--arch", "convs2s_tiny"]
    run("train", data, "--user-dir", user_dir, *training, cwd=tmp_path, path=site)
    assert (tmp_path / "save" / "checkpoint_last.pt").exists()
