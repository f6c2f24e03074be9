"""Facts of an imagined machine, for the tests of what `poolgate check` says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.config.load import parse
from workers.facts import Facts, ModelDir
from workers.finding import Finding
from workers.gpu import Card
from workers.spec import specs_of

MODEL = "/models/m"
WHOLE = ModelDir(
    "directory",
    names=frozenset({"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}),
    config={"architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "max_position_embeddings": 8192},
    weights_bytes=2**30,
    has_chat_template=True,
)
CARDS = (
    Card("0", "GPU-aaaa0000-0000-0000-0000-000000000000", 80_000, 600),
    Card("1", "GPU-bbbb0000-0000-0000-0000-000000000000", 80_000, 600),
)


def facts_of(pools: dict[str, dict[str, Any]], sections: dict[str, Any] | None = None, **known: Any) -> Facts:
    """A machine that lacks nothing, unless `known` says so. One without model and urls gets MODEL; all are bounded."""
    pools = {
        name: {"max_in_flight": 8, **({} if "urls" in pool else {"model": MODEL}), **pool}
        for name, pool in pools.items()
    }
    first = next(iter(pools))
    data = {"pools": pools, "routes": {"r": {"targets": [{"pool": first}]}}, **(sections or {})}
    loaded = parse(data, Path("/etc/poolgate/config.toml"))
    cards = known.setdefault("cards", ())
    specs = tuple(specs_of(loaded, "here", len(cards)))
    known.setdefault("models", {spec.model: WHOLE for spec in specs if spec.model_is_local})
    known.setdefault("memory_bytes", 64 * 2**30)
    return Facts(config=loaded.config, directory=loaded.directory, specs=specs, **known)


def the_one(found: list[Finding], key: str) -> Finding:
    """The only finding with this key path."""
    matching = [finding for finding in found if finding.key == key]
    assert len(matching) == 1, f"{key}: {[finding.line for finding in found]}"
    return matching[0]
