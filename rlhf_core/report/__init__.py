"""The door to the round's report: a `RoundView` in, `report.md` with its plots and `report.html` out."""

from rlhf_core.report.page import write_report
from rlhf_core.report.view import CalibrationPoint, RoundView, Sample, Scores

__all__ = ["CalibrationPoint", "RoundView", "Sample", "Scores", "write_report"]
