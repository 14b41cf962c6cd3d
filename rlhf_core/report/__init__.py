"""The door to the round's report: a `RoundView` in, `report.md` and its plots out."""

from rlhf_core.report.page import write_report
from rlhf_core.report.view import CalibrationPoint, RoundView, Sample

__all__ = ["CalibrationPoint", "RoundView", "Sample", "write_report"]
