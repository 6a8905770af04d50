"""The commit that reports name: that of the code which ran, or none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from carrel.process.version import commit


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "step.py").write_text("pass\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "It is there")
    git(folder, "tag", "--annotate", "v1", "--message", "a tag is no commit")
    return folder


def test_a_commit_is_told_and_that_the_code_is_another(checkout: Path) -> None:
    copied = shutil.copytree(checkout, checkout.with_name("copied"))
    changed = shutil.copytree(checkout, checkout.with_name("changed"))
    # As a newer tree that was copied over an older checkout.
    (changed / "code" / "step.py").write_text("raise NotImplementedError\n")
    named = git(checkout, "rev-parse", "--short", "HEAD")
    assert [commit(folder) for folder in (checkout, copied, changed)] == [named, named, f"{named}-dirty"]


def test_a_tree_without_a_git_folder_has_the_commit_of_no_other(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(checkout / "code") == "unknown"
    # As in a hook of git.
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    bare = shutil.copytree(checkout, checkout.with_name("bare"), ignore=shutil.ignore_patterns(".git"))
    assert commit(bare) == "unknown"
