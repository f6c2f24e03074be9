"""The import rule: edge → dispatch → {admission | routing | upstream} → fleet → config → domain, and workers apart."""

from __future__ import annotations

import pytest
from architecture.imports import COMPOSITION, MAY_IMPORT, ROOT, faults, imports_of, layer_of, read_tree, table


def test_every_import_of_the_tree_keeps_the_rule() -> None:
    assert faults(read_tree()) == []


def test_the_tree_is_really_read() -> None:
    modules = {found.module for found in read_tree()}
    assert {"gateway.dispatch", "gateway.app", "gateway.edge.inference", "workers.supervisor"} <= modules


def test_every_layer_of_the_rule_exists() -> None:
    expected = [ROOT / "gateway" / name for name in MAY_IMPORT if name not in ("composition", "workers")]
    missing = [path for path in expected if not path.is_dir() and not path.with_suffix(".py").is_file()]
    assert missing == []
    assert [name for name in COMPOSITION if not (ROOT / "gateway" / f"{name}.py").is_file()] == []


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("gateway.domain.route", "import httpx", "standard library only"),
        ("gateway.domain.route", "from gateway.config.schema import Config", "nothing of ours"),
        ("gateway.config.load", "import gateway.fleet.snapshot", "config may import domain"),
        ("gateway.fleet.registry", "from gateway.routing import choose", "fleet may import"),
        ("gateway.admission.gate", "from gateway.routing.choose import choose", "admission may import"),
        ("gateway.routing.choose", "from gateway.upstream.attempt import Attempts", "routing may import"),
        ("gateway.upstream.attempt", "import gateway.admission.budget as budget", "upstream may import"),
        ("gateway.dispatch", "from gateway.edge.decode import decode", "dispatch may import"),
        ("gateway.dispatch", "import litestar", "litestar may be imported in gateway.edge and gateway.app only"),
        ("gateway.edge.ops", "from gateway.app import build", "edge may import"),
        ("gateway.app", "from workers.supervisor import Supervisor", "composition may import"),
        ("workers.supervisor", "from gateway.fleet.snapshot import Snapshot", "workers may import config, domain"),
        ("workers.command", "from vllm import LLM", "vllm may be imported in no module only"),
        ("gateway.edge.decode", "import httptools", "httptools may be imported in"),
        ("gateway.upstream.connection_pool", "import httptools", "httptools may be imported in"),
        ("gateway.helpers.text", "import os", "gateway.helpers has no place in the import rule"),
        ("gateway.routing.choose", "from ..upstream.attempt import Attempts", "gateway.upstream.attempt.Attempts"),
        ("gateway.routing.choose", "from .. import upstream", "imports gateway.upstream:"),
        ("gateway.routing.choose", "def f():\n    from gateway.edge import ops", "gateway.routing.choose:2"),
        (
            "gateway.routing.choose",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gateway.dispatch",
            "gateway.routing.choose:3",
        ),
    ],
)
def test_a_forbidden_import_is_told(module: str, source: str, told: str) -> None:
    assert len(broken := faults(imports_of(module, source))) == 1
    assert told in broken[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gateway.edge.inference", "from litestar import asgi\nfrom gateway.dispatch import Dispatch"),
        ("gateway.routing.choose", "from gateway.fleet.snapshot import Snapshot\nfrom . import table"),
        ("gateway.upstream.connection", "import httptools"),
        ("workers.fake_engine.wire", "import httptools\nfrom workers.ports import free_port"),
        ("gateway.domain.errors", "import enum\nfrom gateway.domain.route import Route"),
        ("gateway.app", "from gateway.edge.inference import routes\nimport gateway"),
    ],
)
def test_an_allowed_import_is_no_fault(module: str, source: str) -> None:
    assert faults(imports_of(module, source)) == []


def test_a_relative_import_in_a_package_starts_from_the_package() -> None:
    (found,) = imports_of("gateway.fleet", "from .snapshot import Snapshot", is_package=True)
    assert found.name == "gateway.fleet.snapshot.Snapshot"


def test_a_name_is_put_into_its_layer() -> None:
    assert layer_of("gateway.fleet.sources.static") == "fleet"
    assert layer_of("gateway.cli_keys") == "composition"
    assert (layer_of("gateway"), layer_of("os.path")) == (None, None)


def test_the_table_counts_imports_between_layers() -> None:
    found = imports_of("gateway.edge.ops", "from gateway.domain import errors, route\nimport gateway.dispatch")
    header, *rows = table(found).splitlines()
    edge = dict(zip(header.split(), next(row for row in rows if row.startswith("edge")).split()[1:], strict=False))
    assert header.split()[0] == "domain" and edge["domain"] == "2"
