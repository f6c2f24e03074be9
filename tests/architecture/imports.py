"""Reads which module imports which, and judges it by the import rule. Used by test_imports.py and `make imports`.

Source is parsed, nothing is run: every `import` counts, also one in a function or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("gateway", "workers")

# What each layer may import of ours, lowest first. A layer is a package, or the modules that stand beside the packages.
_GROUND = ("config", "domain")
_MIDDLE = ("admission", "routing", "upstream")  # these do not know one another
_UNDER_EDGE = ("runtime", "dispatch", *_MIDDLE, "fleet", "telemetry", *_GROUND)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "domain": (),
    "config": ("domain",),
    "telemetry": _GROUND,
    "fleet": _GROUND,
    "admission": ("fleet", *_GROUND),
    "routing": ("fleet", *_GROUND),
    "upstream": ("fleet", *_GROUND),
    "dispatch": (*_MIDDLE, "fleet", "telemetry", *_GROUND),
    "runtime": ("dispatch", *_MIDDLE, "fleet", "telemetry", *_GROUND),
    "edge": _UNDER_EDGE,
    "composition": ("edge", *_UNDER_EDGE),
    "workers": _GROUND,
}
COMPOSITION = ("app", "serve", "cli", "entry", "__main__")  # gateway/*.py that join the parts; cli_* as well

# Where a foreign package may be imported; a module stands for itself and what is below it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "litestar": ("gateway.edge", "gateway.app"),
    "httptools": (
        "gateway.edge.front",
        "gateway.edge.lane",
        "gateway.edge.app_cycle",
        "gateway.upstream.connection",
        "workers.fake_engine",
    ),
    "vllm": (),
}


@dataclass(frozen=True, slots=True)
class Import:
    """Line `line` of `module` imports `name`: a module, or a name in one. Both dotted and absolute."""

    module: str
    name: str
    line: int


def imports_of(module: str, source: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a source text. `is_package`: it is an `__init__.py`, which relative imports start from."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            for alias in node.names:
                yield Import(module, ".".join(filter(None, [*base, node.module, alias.name])), node.lineno)


def read_tree(root: Path = ROOT) -> list[Import]:
    """All imports of our packages, in the order of their files."""
    found: list[Import] = []
    for file in sorted(file for package in OURS for file in (root / package).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += imports_of(module, file.read_text(), is_package=is_package)
    return found


def layer_of(name: str) -> str | None:
    """`gateway.routing.choose` → "routing", `gateway.app` → "composition"; None: not ours, or `gateway` itself."""
    first, *rest = name.split(".")
    if first == "workers":
        return first
    if first != "gateway" or not rest:
        return None
    return "composition" if rest[0] in COMPOSITION or rest[0].startswith("cli_") else rest[0]


def faults(imports: Iterable[Import]) -> list[str]:
    """One line per import that breaks the rule; empty when all keep it."""
    return [f"{i.module}:{i.line} imports {i.name}: {why}" for i in imports if (why := _fault(i)) is not None]


def _fault(found: Import) -> str | None:
    source, target = layer_of(found.module), layer_of(found.name)
    if source is not None and source not in MAY_IMPORT:
        return f"gateway.{source} has no place in the import rule; give it one in tests/architecture/imports.py"
    if target is not None and source is not None and target != source and target not in MAY_IMPORT[source]:
        return f"{source} may import {', '.join(MAY_IMPORT[source]) or 'nothing of ours'}"
    package = found.name.split(".")[0]
    if target is None and source == "domain" and package not in sys.stdlib_module_names:
        return "domain is made of the standard library only"
    places = ONLY_IN.get(package)
    if places is not None and not any(f"{found.module}.".startswith(f"{place}.") for place in places):
        return f"{package} may be imported in {' and '.join(places) or 'no module'} only"
    return None


def table(imports: Iterable[Import]) -> str:
    """Rows import columns: how many import statements, layer by layer."""
    counts = Counter((layer_of(i.module), layer_of(i.name)) for i in imports)
    layers = list(MAY_IMPORT)
    width = max(map(len, layers)) + 1
    lines = [" " * width + "".join(f"{layer:>{width}}" for layer in layers)]
    for row in reversed(layers):
        cells = ("." if row == column else str(counts[row, column] or "") for column in layers)
        lines.append(f"{row:<{width}}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    found = read_tree()
    print(table(found))
    print("\n".join(["", *(faults(found) or ["every import keeps the rule"])]))
