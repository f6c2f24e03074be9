"""Text of /metrics: those of vLLM's names that a gateway reads, and our own count of aborted requests."""

from __future__ import annotations

from collections.abc import Mapping

from workers.fake_engine.engine import Engine
from workers.fake_engine.options import Options

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_REASONS = ("stop", "length", "abort", "error", "repetition")


def exposition(engine: Engine, options: Options) -> bytes:
    """Prometheus text; the label model_name is the first served name."""
    model = options.names[0].replace("\\", "\\\\").replace('"', '\\"')
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
        for label, value in values.items():
            labels = ",".join(sorted(filter(None, ('engine="0"', f'model_name="{model}"', label))))
            lines.append(f"{name}{{{labels}}} {float(value)}")

    waiting = engine.waiting
    family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", {"": engine.running})
    family("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", {"": waiting})
    by_reason = {'reason="capacity"': float(waiting), 'reason="deferred"': 0.0}
    family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", by_reason)
    usage = min(1.0, engine.kv_tokens / options.kv_tokens)
    family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", {"": usage})
    family("vllm:num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", {"": 0})
    prompt, output = {"": engine.prompt_tokens}, {"": engine.generation_tokens}
    family("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", prompt)
    family("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", output)
    finished = {f'finished_reason="{reason}"': float(engine.finished[reason]) for reason in _REASONS}
    family("vllm:request_success_total", "counter", "Count of successfully processed requests.", finished)
    family("fake:aborted_total", "counter", "Requests whose client left.", {"": engine.aborted})
    return ("\n".join(lines) + "\n").encode()
