"""nanovllm's counters as vLLM's metrics, with the names that vLLM gives them."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A total since the engine was made."""

    value: int


@dataclass
class Vector(Metric):
    """Totals by place: of drafts' accepted tokens."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """The present state."""

    value: float


@dataclass
class Histogram(Metric):
    """Count and sum of observations. nanovllm has no buckets: "+Inf" holds them all."""

    count: int
    sum: float
    buckets: dict[str, int]


GAUGES = "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"


def as_metrics(counters: dict[str, Any], model: str) -> list[Metric]:
    """Turn the dictionary ``llm.metrics()`` into a list of metrics."""
    metrics: list[Metric] = []
    labels = {"model_name": model, "engine": "0"}
    for key, value in counters.items():
        name = f"vllm:{key}"
        if key in GAUGES:
            metrics.append(Gauge(name, labels, value))
        elif isinstance(value, list):
            metrics.append(Vector(name, labels, value))
        elif not isinstance(value, dict):
            metrics.append(Counter(name, labels, value))
        elif "count" in value:
            metrics.append(Histogram(name, labels, value["count"], value["sum"], {"+Inf": value["count"]}))
        else:
            metrics += [Counter(name, {**labels, "finished_reason": end}, total) for end, total in value.items()]
    return metrics
