"""requirements.lock is the whole of what the gateway needs, on whatever Python the tests run."""

from __future__ import annotations

import subprocess
import sys


def test_installed_environment_lacks_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
