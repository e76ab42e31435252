"""The arguments of python -m profiling.sweep."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from profiling import cases, grid
from profiling.cases import Shape
from profiling.command_line import positive_integer, seed
from profiling.suites import HAVE_FILES, SUITES

REPEATS, QUICK_REPEATS = 30, 10

DESCRIPTION = """\
Measure cute_kernels beside what one would run without it: dense products (cuBLAS on a GPU, torch on a CPU), dense
attention (torch's scaled_dot_product_attention, FlashInfer where it is installed), for compress a copy of as many
bytes. On a CPU the peer has the fastest of float16, bfloat16 and float32, which the row names. Every result, the peers'
too, is checked against a float64 computation. Times are medians of single calls with a cold cache unless asked
otherwise, in a CPU's suites with a warm one, too; ratio is the peer's time over ours."""

EPILOG = """\
What is measured: without arguments all suites, for the device at hand; --suite chooses some. --op, --backend, --keep,
--dtype, --data select from them. --shape and --grid replace them by cases of your own, float16 and gaussian with 30 %%
and 50 %% of the channels kept unless --keep, --dtype, --data or the grid say otherwise. Options may be repeated.

suites:
{suites}

grids: --grid T=1024..65536 keep=38,64 B=1,8 data=gaussian,outlier; a range doubles, or counts: keep=16..128+16. Keys:
{keys}. In a file:
  suites: [readme]
  grids:
    - {{op: sparse_qk, T: [4096, 16384], sparsity: [0.5, 0.7], cache: [cold, warm]}}

Rows go to build/profiling/DEVICE/, which git ignores, as sweep.json, or, where it is complete, as NAME.json of --suite
{files}; --out DIR names another folder. With --commit-results, a complete run goes to
profiling/results/DEVICE/, which git tracks. python -m profiling.report FOLDER makes tables, CSV and plots of them.

Exit status: 0 every row within tolerance; 1 a result was inaccurate, the device failed or counters were not to be had;
2 wrong arguments or nothing measured; 130 interrupted, the finished rows are written."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    suites = "\n".join(f"  {name:10} {suite.about}" for name, suite in SUITES.items())
    epilog = EPILOG.replace("%%", "%").format(suites=suites, keys=", ".join(grid.KEYS), files=", ".join(HAVE_FILES))
    parser = argparse.ArgumentParser(
        prog="python -m profiling.sweep",
        description=DESCRIPTION,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _what(parser.add_argument_group("what to measure").add_argument)
    _how(parser.add_argument_group("how").add_argument)
    _files(parser.add_argument_group("rows").add_argument)
    _counters(parser.add_argument_group("hardware counters").add_argument)
    args = parser.parse_args(arguments)
    if args.shape and (args.grid or args.grid_file or args.suite):
        parser.error("--shape names the cases by itself: give it without --suite, --grid and --grid-file")
    if not args.ncu and (args.ncu_path or args.ncu_report or args.clock_control != "none"):
        parser.error("--ncu-path, --ncu-report and --clock-control go with --ncu")
    if args.commit_results and (args.out or args.resume or not selects_all(args)):
        parser.error(
            f"--commit-results takes all suites or one of {', '.join(HAVE_FILES)}, whole and as they are, without "
            "--out and --resume"
        )
    return args


def selects_all(args: argparse.Namespace) -> bool:
    """Whether the cases are all those of all suites, or of a suite that has a file of its own."""
    own = (
        args.op,
        args.backend,
        args.shape,
        args.keep,
        args.dtype,
        args.data,
        args.codec,
        args.method,
        args.scores,
        args.cache,
        args.peer,
        args.grid,
        args.grid_file,
        args.timing,
        args.stages_ahead,
        args.plugin,
    )
    if args.quick or any(own) or args.repeats is not None or args.seed != 0:
        return False
    return args.suite is None or (len(args.suite) == 1 and SUITES[args.suite[0]].has_file)


def _what(add: Callable[..., object]) -> None:
    add("--suite", action="append", choices=SUITES, help="named list of cases (default: all of them)")
    add("--grid", action="append", nargs="+", metavar="KEY=LIST", help="every combination of the lists")
    add("--grid-file", action="append", type=Path, metavar="FILE", help="suites and grids of a YAML or JSON file")
    add("--op", action="append", choices=cases.OPS, help="operation to measure (default: all)")
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="backend to measure (default: all of the device): a name of cute_kernels.backends(); for compress cpu or "
        "cuda; for a dense operation a peer",
    )
    add(
        "--shape",
        action="append",
        type=_shape,
        metavar="B,Hq,Hkv,Sq,T,D",
        help="batch, query heads, KV heads, query tokens, cached tokens, head dim; such as 8,32,8,1,16384,128",
    )
    add("--keep", action="append", type=positive_integer, metavar="N", help="channels kept of each token")
    add("--dtype", action="append", choices=cases.DTYPES, help="of cache, queries, weights and outputs")
    add(
        "--data",
        action="append",
        choices=cases.DATA,
        help="gaussian; outlier: lognormal channel scales; equal: every value stream equally long, so no padding",
    )
    add("--codec", choices=cases.CODECS, help="that caches are stored in (default: that of their dtype)")
    add(
        "--method",
        choices=cases.METHODS,
        help="rule by which caches are pruned; 2of4 goes with --keep D/2 (default: magnitude)",
    )
    add(
        "--scores",
        action="append",
        choices=("float16", "bfloat16", "float32"),
        help="dtype of sparse_qk's logits and sparse_av's p (default: the cache's)",
    )
    add("--peer", action="append", metavar="NAME", help="peer beside which to measure (default: all that can)")
    add(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="module with more peers: profiling/peers/base.py",
    )
    add("--quick", action="store_true", help="a short list of small shapes: a smoke test, no figures to quote")


def _how(add: Callable[..., object]) -> None:
    add(
        "--cache",
        action="append",
        choices=cases.CACHES,
        help="last-level cache at every call: cold, other operands each time (default), or warm, the same ones again",
    )
    add(
        "--timing",
        choices=cases.TIMINGS,
        help="events: single calls (default); graph: a CUDA graph of many calls, divided; auto: graph below 50 us",
    )
    add(
        "--stages-ahead",
        action="append",
        type=positive_integer,
        metavar="N",
        help="stages of shared memory beyond those that are read: of every worker (sm80: 1 or 2), of all workers of an "
        "SM together (sm90); a plan has fewer workers if they do not fit otherwise, and up to three stages fewer, "
        "for producers share them evenly (default: as cute_kernels/dispatch/heuristics.hpp chooses)",
    )
    add(
        "--repeats",
        type=positive_integer,
        metavar="N",
        help=f"timed calls a row (default: {REPEATS}, with --quick {QUICK_REPEATS})",
    )
    add("--seed", type=seed, default=0, metavar="N", help="of all random inputs (default: 0)")
    add("--list", action="store_true", help="print the cases, each as the command that measures it alone, and stop")


def _files(add: Callable[..., object]) -> None:
    add("--out", type=Path, metavar="DIR", help="folder for the file (default: see below)")
    add(
        "--commit-results",
        action="store_true",
        help="replace the committed rows of this device, once all cases are measured",
    )
    add(
        "--resume",
        type=Path,
        metavar="FILE.json",
        help="keep its rows, measure only cases that it lacks or that it has from another commit, and write into it",
    )
    add("--compare", type=Path, metavar="OLD.json", help="list the rows that moved beyond noise since then")


def _counters(add: Callable[..., object]) -> None:
    add(
        "--ncu",
        action="store_true",
        help="run the cases once more under Nsight Compute, add counters to their rows and say what limits each kernel",
    )
    add("--ncu-path", type=Path, metavar="PROGRAM", help="ncu (default: on the PATH or in CUDA_HOME)")
    add(
        "--clock-control",
        choices=("none", "base"),
        default="none",
        help="ncu's: base locks the clock low, for repeatable cycles (default: %(default)s)",
    )
    add("--ncu-report", type=Path, metavar="FILE", help="keep the report, for ncu-ui")


def _shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
