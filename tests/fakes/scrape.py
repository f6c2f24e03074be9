"""Reads the gateway's `/metrics` as Prometheus would, with the parser of its own client library."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one text; a sample's labels are a set, since their order means nothing."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    kinds: dict[str, str]

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples of `poolgate_<name>` with these labels; `class` is written `class_`."""
        wanted = {(key.rstrip("_"), value) for key, value in labels.items()}
        return sum(v for (n, have), v in self.samples.items() if n == f"poolgate_{name}" and wanted <= have)

    def growing(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """What may never go down: counters, and the parts of histograms."""
        return {
            (name, labels): value
            for (name, labels), value in self.samples.items()
            if name.endswith(("_total", "_bucket", "_sum", "_count"))
        }


def read(text: str) -> Scrape:
    """AssertionError when a sample comes twice; ValueError for what is not the format."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    kinds: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        kinds[family.name] = family.type
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    return Scrape(samples, kinds)
