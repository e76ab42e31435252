"""What runs under Nsight Compute: python -m profiling.counters.child CASES.json.

Each case is one call inside an NVTX range of its index, between the calls that start and stop the profiler, after a
warm-up. A case that cannot run is told on stderr and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from profiling import operations, peers
from profiling.cases import Case, Load, Shape
from profiling.counters.join import LABEL
from profiling.measure import is_fatal


def to_object(case: Case, form: str) -> dict[str, Any]:
    """A case as JSON; form: of a dense operation, the one to run."""
    return {"case": asdict(case), "form": form}


def from_object(values: dict[str, Any]) -> tuple[Case, str]:
    fields = dict(values["case"])
    load = dict(fields.pop("load"))
    return Case(load=Load(Shape(**load.pop("shape")), **load), **fields), values["form"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.counters.child", description=__doc__)
    parser.add_argument("cases", type=Path, metavar="CASES.json", help="what profiling.counters.collect writes")
    content = json.loads(parser.parse_args(arguments).cases.read_text(encoding="utf-8"))
    for module in content["plugins"]:
        peers.load(module)
    for number, (index, values) in enumerate(content["cases"], 1):
        case, form = from_object(values)
        print(f"[{number}/{len(content['cases'])}] counting {case}", file=sys.stderr, flush=True)
        try:
            run_one(index, prepared(case, form))
        except (RuntimeError, ValueError) as error:
            print(f"  no counters: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            if is_fatal(error):
                return 1
    return 0


def prepared(case: Case, form: str) -> Callable[[], object]:
    """The call to profile."""
    inputs = operations.prepare(case, torch.device("cuda", torch.cuda.current_device()))
    if not case.is_dense:
        return lambda: operations.call(case, inputs)
    peer = peers.named(case.backend).peer(case, inputs)
    return lambda: peer.forms[form](*peer.operands)


def run_one(index: int, call: Callable[[], object]) -> None:
    call()  # loads modules
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(f"{LABEL}{index}")
    try:
        call()
        torch.cuda.synchronize()
    finally:
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
