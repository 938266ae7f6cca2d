from __future__ import annotations

from penstock.adapt.concurrency import Pressure
from penstock.dispatch.http.vllm_metrics import parse_pressure

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 60.0
vllm:num_requests_running{engine="1",model_name="llama"} 40.0
vllm:num_requests_waiting{engine="0",model_name="llama"} 7.0
vllm:num_requests_waiting{engine="1",model_name="llama"} nonsense
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="llama"} 0.91
vllm:num_requests_running_total 1e9
"""


def test_engines_are_added_up_and_the_fullest_cache_counts() -> None:
    assert parse_pressure(PAGE) == Pressure(100, 7, 0.91)


def test_a_page_of_another_kind_says_nothing() -> None:
    assert parse_pressure(b"process_cpu_seconds_total 4\n") is None
    assert parse_pressure(b"\xff\xfe<html>") is None
