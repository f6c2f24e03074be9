from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.model_dir import MAX_JSON_BYTES, read_model_dir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    return tmp_path


def index(model: Path, *files: str) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"layer{i}": name for i, name in enumerate(files)}})
    )


def test_a_directory_is_read(model):
    read = read_model_dir(model)
    assert (read.kind, read.faults, read.missing_shards, read.lfs_pointers) == ("directory", (), (), ())
    assert read.config == {"num_attention_heads": 2}
    assert read.weights_bytes == 5000
    assert not read.has_chat_template


def test_what_is_no_directory(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert read_model_dir(tmp_path / "m.gguf").kind == "file"
    assert read_model_dir(tmp_path / "nothing").kind == "missing"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert read_model_dir(loop).kind == "unreadable"


def test_shards_of_the_index_that_are_not_there(model):
    index(model, "model.safetensors", "model-2.safetensors", "model-2.safetensors", "model-1.safetensors")
    assert read_model_dir(model).missing_shards == ("model-1.safetensors", "model-2.safetensors")


@pytest.mark.parametrize("text", ['{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_lists_nothing_misses_nothing(model, text):
    (model / "model.safetensors.index.json").write_text(text)
    assert read_model_dir(model).missing_shards == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "config.json is not JSON"),
        ("\ud800", "config.json is not JSON"),
        ("[" * 100_000, "config.json is not JSON"),
        ("[]", "config.json is not a JSON object"),
    ],
    ids=["cut", "not UTF-8", "deep", "list"],
)
def test_a_config_that_cannot_be_read_is_a_fault_not_a_traceback(model, text, fault):
    (model / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    assert read_model_dir(model).faults == (fault,)


def test_a_config_of_absurd_size_is_not_read(model):
    with (model / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    assert read_model_dir(model).faults == ("config.json is larger than 64 MiB",)


def test_git_lfs_pointers_are_told_from_weights(model):
    (model / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    (model / "model-2.safetensors").write_bytes(b"tiny but real")
    assert read_model_dir(model).lfs_pointers == ("model-1.safetensors",)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: (m / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}'),
        lambda m: (m / "chat_template.jinja").write_text("{{ messages }}"),
        lambda m: (m / "chat_template.json").write_text("{}"),
        lambda m: (m / "chat_templates").mkdir(),
    ],
    ids=["tokenizer config", "jinja", "json", "folder"],
)
def test_the_chat_template_is_found_where_transformers_looks(model, make):
    make(model)
    assert read_model_dir(model).has_chat_template


def test_files_may_be_links_as_in_the_hubs_cache(model, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(model / name)
    read = read_model_dir(snapshot)
    assert (read.weights_bytes, read.config) == (5000, {"num_attention_heads": 2})
