"""Progress of a sweep: a tqdm bar where tqdm is installed and the terminal can show it, else plain lines."""

from __future__ import annotations

import sys

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Progress:
    """Announces each case on stderr. Use as a context manager."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self._total, self._done, self._quiet = total, 0, quiet
        shown = tqdm and sys.stderr.isatty() and not quiet
        self._bar = tqdm(total=total, unit="case", file=sys.stderr) if shown else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, name: str) -> None:
        if self._bar is not None:
            self._bar.set_description(name)

    def finish(self, line: str) -> None:
        """Ends a case with what came of it."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
            tqdm.write(line, file=sys.stderr)
        elif not self._quiet:
            print(f"[{self._done}/{self._total}] {line}", file=sys.stderr, flush=True)
