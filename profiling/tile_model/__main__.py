"""Derives tile, stages, limiter and time of a GEMM or of a sparse product from a device's limits, step by step."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from profiling.cases import DATA, DTYPES, Case, Load, Shape
from profiling.tile_model import explain, gemm, products, rows
from profiling.tile_model.device import DEVICES, SOURCES, UnknownDevice, describe, find

OPS = {"qk": "sparse_qk", "av": "sparse_av"}
BACKENDS = ("sm80", "sm90")
EXAMPLES = """examples:
  python -m profiling.tile_model --device H100 --gemm 8192 8192 8192
  python -m profiling.tile_model --device H200 --case qk --shape 8,32,8,1,16384,128 --keep 38
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m profiling.tile_model",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--device",
        default="H200",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, or attached, this machine's GPU (default: %(default)s)",
    )
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--gemm", nargs=3, type=int, metavar=("M", "N", "K"), help="a dense fp16 GEMM")
    what.add_argument("--case", choices=OPS, help="a sparse product; takes --shape and --keep")
    what.add_argument("--list-devices", action="store_true", help="the built-in devices, and who says so")
    p.add_argument(
        "--shape", metavar="B,Hq,Hkv,Sq,T,D", help="batch, query heads, KV heads, query tokens, cached tokens, head dim"
    )
    p.add_argument("--keep", type=int, metavar="N", help="nonzeros a token and head")
    p.add_argument("--backend", choices=BACKENDS, help='of a sparse product (default: what "auto" takes)')
    p.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of cache and queries (default: %(default)s)")
    p.add_argument(
        "--data",
        choices=DATA,
        default=DATA[0],
        help="in the cache: decides the padding, and which row to compare with (default: %(default)s)",
    )
    p.add_argument("--all", action="store_true", help="every candidate of a GEMM")
    p.add_argument("--json", action="store_true", help="the candidates and the choice as JSON")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if args.case and (args.shape is None or args.keep is None):
        p.error("--case takes --shape B,Hq,Hkv,Sq,T,D and --keep N")
    if not args.case and (args.shape is not None or args.keep is not None):
        p.error("--shape and --keep go with --case")
    try:
        if args.list_devices:
            _list_devices(args.json)
        elif args.gemm:
            _gemm(args)
        else:
            _product(args)
    except (UnknownDevice, ValueError) as error:
        print(f"tile_model: {error}", file=sys.stderr)
        return 2
    return 0


def _list_devices(as_json: bool) -> None:
    if as_json:
        print(json.dumps({"devices": [asdict(device) for device in DEVICES.values()], "sources": SOURCES}, indent=1))
        return
    for device in DEVICES.values():
        print(*describe(device), sep="\n")
    print("sources:")
    for what, source in SOURCES.items():
        print(f"  {what}: {source}")


def _gemm(args: argparse.Namespace) -> None:
    device, shape = find(args.device), gemm.Shape(*args.gemm)
    if not args.json:
        print(*explain.gemm_lines(device, shape, args.all), sep="\n")
        return
    found = gemm.candidates(device, shape)
    print(
        json.dumps(
            {
                "device": asdict(device),
                "gemm": asdict(shape),
                "chosen": explain.as_data(found[0]),
                "candidates": [explain.as_data(c) for c in found],
            },
            indent=1,
        )
    )


def _product(args: argparse.Namespace) -> None:
    device = find(args.device)
    backend = args.backend or ("sm90" if device.is_hopper else "sm80")
    case = Case(OPS[args.case], backend, Load(Shape.parse(args.shape), args.keep, args.dtype, args.data))
    measured = rows.measured(device, case)
    if not args.json:
        print(*explain.product_lines(device, case, measured), sep="\n")
        return
    plans = products.candidates(device, case)
    print(
        json.dumps(
            {
                "device": asdict(device),
                "case": str(case),
                "measured_us": measured,
                "chosen": explain.as_data(products.best(device, case)),
                "candidates": [explain.as_data(plan) for plan in plans],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
