"""A run of a sweep: measures case after case, keeps what is done, and tells what became of the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from profiling import rows as rows_module
from profiling import selection, tables
from profiling.cases import Case
from profiling.counters.fields import Counters
from profiling.environment import Environment, environment
from profiling.measure import is_fatal, measure_case
from profiling.progress import Progress
from profiling.rows import Row, case_key, untimed_key

SAVE_EVERY_S = 20.0


class Run:
    """The state of one run: its rows so far, and the devices it met."""

    def __init__(
        self, backends: Mapping[str, str], wanted_peers: Sequence[str] | None = None, earlier: Sequence[Row] = ()
    ) -> None:
        self.new: list[Row] = []
        self.skipped: dict[str, int] = {}  # reason -> cases
        self.missing: dict[str, int] = {}  # reason why a peer is missing -> cases
        self.device_lost = False
        self.slug = "unknown"  # of the device of the latest row
        self._backends, self._wanted, self._earlier = backends, wanted_peers, list(earlier)
        self._environments: dict[str, Environment] = {}

    @property
    def rows(self) -> list[Row]:
        """Those of earlier runs and this one's, which replace theirs."""
        again = {(row.device, row.isa, *case_key(row.case)) for row in self.new}
        return [row for row in self._earlier if (row.device, row.isa, *case_key(row.case)) not in again] + self.new

    def remaining(self, chosen: Sequence[Case]) -> list[Case]:
        """The cases that no earlier row of this device, commit and torch answers with the same seed and repeats."""
        return [case for case in chosen if not self._answered(case)]

    def _answered(self, case: Case) -> bool:
        if not self._earlier or selection.unavailable(case.backend, self._backends):
            return False
        env = self._environment(case)
        return any(
            (untimed_key(row.case), row.seed, row.repeats) == (untimed_key(case), case.seed, case.repeats)
            and (row.timing == case.timing or case.timing == "auto")
            and (row.device, row.isa, row.commit, row.torch) == (env.name, env.isa, env.commit, env.torch)
            and row.accurate
            for row in self._earlier
        )

    def measure(self, chosen: Sequence[Case], save: Callable[[], object] = lambda: None) -> None:
        """Adds the rows of each case, calling `save` now and then; one that cannot run is skipped with its reason."""
        saved = time.monotonic()
        with Progress(len(chosen)) as progress:
            for case in chosen:
                progress.start(str(case))
                self._one(case, progress)
                if self.device_lost:
                    return
                if time.monotonic() - saved > SAVE_EVERY_S:
                    save()
                    saved = time.monotonic()

    def _one(self, case: Case, progress: Progress) -> None:
        reason = selection.unavailable(case.backend, self._backends)
        try:
            outcome = None if reason else measure_case(case, self._environment(case), self._wanted)
        except (RuntimeError, ValueError) as error:  # the backend does not serve the case, or memory is short
            outcome, reason = None, " ".join(str(error).split())
            if is_fatal(error):
                self.device_lost = True
                progress.finish(f"FAILED {case}: {reason}; the device is lost, stopping")
                return
        if outcome is None:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            progress.finish(f"skipped {case}: {reason}")
            return
        for why in outcome.missing:
            self.missing[why] = self.missing.get(why, 0) + 1
        self.new += outcome.rows
        progress.finish(f"{case}: " + "; ".join(tables.one_line(row) for row in outcome.rows))

    def _environment(self, case: Case) -> Environment:
        kind = selection.device_of(case)
        if kind not in self._environments:
            index = torch.cuda.current_device() if kind == "cuda" else None
            self._environments[kind] = environment(torch.device(kind, index))
        self.slug = self._environments[kind].slug
        return self._environments[kind]

    def forms(self, chosen: Sequence[Case]) -> dict[Case, str]:
        """The cases that have rows, as those name them -> the form that a dense one ran in."""
        wanted = {untimed_key(case) for case in chosen}
        cases = {replace(row.case, timing="events"): row.peer_form for row in self.rows}
        return {case: form for case, form in cases.items() if untimed_key(case) in wanted}

    def join(self, counted: Mapping[Case, Counters]) -> None:
        """Puts counters into the rows of their cases, whatever those were timed with."""
        found = {untimed_key(case): asdict(counters) for case, counters in counted.items()}
        self.new, self._earlier = (
            [replace(row, **found.get(untimed_key(row.case), {})) for row in part] for part in (self.new, self._earlier)
        )

    def save(self, folder: Path, name: str = rows_module.NAME) -> Path:
        return rows_module.write(self.rows, folder, name)
