"""Where measurements go: an untracked folder, or, when asked for, the committed results of a device."""

from __future__ import annotations

from pathlib import Path

from profiling import ROOT

RESULTS = ROOT / "profiling" / "results"  # committed: JSON, and the plots that the documentation shows
SCRATCH = ROOT / "build" / "profiling"  # untracked: everything else


def of_device(slug: str, commit_results: bool = False) -> Path:
    return (RESULTS if commit_results else SCRATCH) / slug


def devices(folder: Path | None = None) -> list[Path]:
    """The folders of devices that have results."""
    return sorted(path for path in (folder or RESULTS).glob("*") if path.is_dir())
