"""Two workers that take turns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiling import ROOT
from profiling.ab.tasks import Task
from profiling.rows import rounded
from profiling.timing import Timing

# The package is imported before `profiling`, which would put its own checkout's first.
START = "import cute_kernels, profiling.ab.worker as worker; worker.main()"


class AbError(RuntimeError):
    """The comparison cannot go on; the message says why."""


def package_folder(checkout: Path) -> Path:
    """The folder to import cute_kernels from: of a checkout, or the one given.

    Raises:
        AbError: there is no package.
    """
    for folder in (checkout / "python", checkout):
        if (folder / "cute_kernels" / "__init__.py").is_file():
            return folder
    raise AbError(f"{checkout}: no python/cute_kernels there")


class Side:
    """One build's worker process. Use as a context manager."""

    def __init__(self, name: str, checkout: Path, device: str, backend: str, flush_bytes: int | None) -> None:
        self.name, self.checkout = name, checkout
        folder = package_folder(checkout)
        settings = {"device": device, "backend": backend, "flush_bytes": flush_bytes}
        paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,  # an interrupt is for this process, which keeps what is done
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Side:
        try:
            self.about = self.answer()
            if Path(self.about["package"]).resolve() != (package_folder(self.checkout) / "cute_kernels").resolve():
                raise AbError(f"{self.name}: imported {self.about['package']} instead of {self.checkout}'s package")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # of a request that it did not live to read
                pipe.close()

    def ask(self, request: Mapping[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says so

    def answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise AbError(
                f"the process of {self.name}, {self.checkout}, ended with status {self._process.wait()}; "
                "is it built (make build)?"
            )
        return json.loads(line)


@dataclass(frozen=True)
class Comparison:
    """Microseconds of every sample."""

    task: Task
    base: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """New median / base median: more than 1 is slower."""
        return Timing.of(self.new).median_us / Timing.of(self.base).median_us

    def with_more(self, other: Comparison) -> Comparison:
        return replace(self, base=self.base + other.base, new=self.new + other.new)

    def to_object(self) -> dict[str, Any]:
        values = self.task.to_object()
        for name, samples in (("base", self.base), ("new", self.new)):
            timing = Timing.of(samples)
            values |= {f"{name}_us": rounded(timing.median_us), f"{name}_iqr_us": rounded(timing.iqr_us)}
        return values | {"ratio": rounded(self.ratio), "samples": len(self.new)}

    def __str__(self) -> str:
        base, new = Timing.of(self.base), Timing.of(self.new)
        return (
            f"{self.task}: {base.median_us:.1f} -> {new.median_us:.1f} us, {self.ratio:.3f} "
            f"(IQR {base.iqr_us:.1f}, {new.iqr_us:.1f})"
        )


def measure(task: Task, base: Side, new: Side, rounds: int, samples: int) -> Comparison | str:
    """Both sides' samples, in turns; or why a side cannot run the task.

    Raises:
        AbError: a worker ended.
    """
    for side in (base, new):
        side.ask({"task": task.to_object(), "calls": rounds * (samples + 1)})
    errors = [f"{side.name}: {error}" for side in (base, new) if (error := side.answer().get("error"))]
    found: dict[str, list[float]] = {"base": [], "new": []}
    for i in range(0 if errors else rounds):
        for side in (base, new) if i % 2 == 0 else (new, base):
            side.ask({"samples": samples})
            answer = side.answer()
            if "error" in answer:
                return f"{side.name}: {answer['error']}"
            found[side.name] += answer["us"]
    return errors[0] if errors else Comparison(task, tuple(found["base"]), tuple(found["new"]))
