"""requirements.lock is the whole of what the gateway needs, on whatever Python the tests run."""

from __future__ import annotations

import subprocess
import sys


def test_installed_environment_lacks_nothing() -> None:
    command = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
