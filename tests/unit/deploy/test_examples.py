"""Every config that the project ships can be loaded as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.load import load

ROOT = Path(__file__).parents[3]
SHIPPED = [ROOT / "config.toml", *sorted((ROOT / "deploy/examples").glob("*.toml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_config_is_sound(path: Path) -> None:
    assert load(path).config.routes


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_config_in_the_readme_is_sound(readme: str, tmp_path: Path) -> None:
    text = (ROOT / readme).read_text()
    block = text.split("```toml\n")[1].split("```")[0]
    (tmp_path / "config.toml").write_text(block)
    assert set(load(tmp_path / "config.toml").config.pools) == {"chat-large", "chat-small"}
