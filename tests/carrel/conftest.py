"""The command that the tests of this folder run."""

from __future__ import annotations

import pytest
from commands import Command

from carrel.cli import main


@pytest.fixture
def carrel(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(main, capfd)
