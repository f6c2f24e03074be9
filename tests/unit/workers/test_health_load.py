from gateway.domain.replica import Load
from workers.health import load_of

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a b",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 1.5e-01
"""


def test_load_sums_the_engines_of_a_server_and_takes_the_fullest_cache():
    assert load_of(METRICS) == Load(running=4, waiting=7, kv_use=0.25)


def test_a_server_without_these_gauges_is_opaque():
    assert load_of("# nothing\nother_metric 1\n") is None
