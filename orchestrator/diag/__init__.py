"""``dflashctl diag``: evidence → rules → ranked findings → report."""

from __future__ import annotations

from orchestrator.diag.diagnosis import diagnose
from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding, Report

__all__ = ["Evidence", "Finding", "Report", "diagnose"]
