"""How busy the machine is, by MLflow's own monitors and under the names its pages know.

MLflow's thread around them writes to one database as it goes; here the numbers go to a journal.
"""

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor


class SystemMonitor:
    """Processors and memory of this machine, and its GPUs where NVIDIA's library is installed."""

    def __init__(self) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

        self._monitors: list[BaseMetricsMonitor] = [CPUMonitor()]  # type: ignore[no-untyped-call]
        with contextlib.suppress(ImportError, RuntimeError):  # no library, or no GPU
            self._monitors.append(GPUMonitor())  # type: ignore[no-untyped-call]

    def sample(self) -> dict[str, float]:
        """The numbers of this moment, as `system/<name>`."""
        found: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()  # type: ignore[no-untyped-call]
            numbers = monitor.aggregate_metrics()  # type: ignore[no-untyped-call]
            found |= {f"system/{name}": float(value) for name, value in numbers.items()}
            monitor.clear_metrics()  # type: ignore[no-untyped-call]
        return found
