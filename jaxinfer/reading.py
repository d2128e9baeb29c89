"""What a server's /metrics said at one look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Samples of one look at /metrics, by name and labels (the model's name left out)."""

    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Raises ValueError for what is no Prometheus text, or not of a jaxinfer server."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
                samples[sample.name, labels] = sample.value
        if ("jaxinfer_steps_total", ()) not in samples:
            raise ValueError("these are not the metrics of a jaxinfer server")
        return cls(samples)

    def __call__(self, name: str, **labels: str) -> float:
        """The sample jaxinfer_`name`; 0 where there is none."""
        return self.samples.get((f"jaxinfer_{name}", tuple(sorted(labels.items()))), 0.0)

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is such a sample."""
        return (f"jaxinfer_{name}", tuple(sorted(labels.items()))) in self.samples

    def total(self, name: str) -> float | None:
        """The sum of a sample over all its labels; None where there is none."""
        found = [value for (sample, _), value in self.samples.items() if sample == f"jaxinfer_{name}"]
        return sum(found) if found else None

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(bound, values up to it) of a histogram."""
        found = [
            (float(dict(labels)["le"]), value)
            for (sample, labels), value in self.samples.items()
            if sample == f"jaxinfer_{name}_bucket"
        ]
        return sorted(found)
