"""Bits a byte of a byte-level Llama trained here, against the bits an element that its cache takes.

    python -m profiling.recipes.language                      # a GPU: 32 million parameters, some minutes
    python -m profiling.recipes.language --quick              # a CPU: a model of 0.2 million

Trains on public-domain English (profiling.recipes.corpus; extra `recipes`), first on short contexts, then on those that
are evaluated. Documents are stretches of books that were held out: all but the end of each is prefilled, tokens older
than the window are pruned and rounded in every way of profiling.recipes.study, and the end is read 16 bytes at a time.
Rows: bits a byte, and what it is over that of the dense cache, each with its standard error over documents. They go to
build/profiling/<device>/accuracy/language-0/ as they come, with the model, and together as language.json. The same
command goes on where it was interrupted. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling import command_line

try:
    from cute_kernels.eval import models, results
    from cute_kernels.eval.settings import Setting
    from profiling.environment import environment
    from profiling.recipes import corpus, llama, options, study
    from profiling.recipes.means import mean
    from profiling.recipes.steps import Steps
    from profiling.recipes.training import print_to_stderr
except ImportError as error:
    command_line.exit_unbuilt("profiling.recipes.language", error)

COMMAND = "python -m profiling.recipes.language"
NAME = "language"
CHUNK = 16
WARM_UP = 30  # steps
LAST_RATE = 0.1  # of the learning rate, at the end


@dataclass(frozen=True, kw_only=True)
class Size(llama.Shape):
    """context: bytes of a document; scored: of them, its end. short: bytes of a sequence in the first `short_share` of
    the training. tokens: of a training batch."""

    context: int
    scored: int
    short: int
    tokens: int
    learning_rate: float
    short_share: float = 0.6


FULL = Size(
    layers=10,
    hidden=512,
    heads=4,
    kv_heads=2,
    head_dim=128,
    intermediate=1536,
    context=8192,
    scored=256,
    short=1024,
    tokens=1 << 15,
    learning_rate=1e-3,
)
QUICK = Size(
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=64,
    intermediate=192,
    context=512,
    scored=128,
    short=128,
    tokens=1 << 11,
    learning_rate=3e-3,
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    args.given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        models.require("transformers", "the recipe")
        text = corpus.load()
        where = environment(args.device)
        folder = options.folder(args, where)
        run(QUICK if args.quick else FULL, text, folder, args)
        path = folder / f"{NAME}.json"
        rows = study.gather(folder, f"{NAME}-*", path)
    except (ValueError, RuntimeError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    print(study.table(rows, digits=4), f"wrote {path}", sep="\n")
    return 0


def run(size: Size, text: corpus.Corpus, folder: Path, args: argparse.Namespace) -> None:
    """Trains, unless the folder has the model, and measures every setting that has no rows yet."""
    where, device = environment(args.device), args.device
    folder = folder / f"{NAME}-{args.seed}"
    identity = {"quick": args.quick, "seed": args.seed, "seconds": args.seconds, "documents": args.documents}
    kept = results.Store(folder, identity)
    learnt = folder / "model"
    settings = study.chosen_settings(size.head_dim)
    missing = [setting for setting in settings if not kept.has(setting, "text")]
    if not missing:
        return
    if (learnt / "config.json").is_file():
        model = models.load_model(learnt, device)
    else:
        model = build(size, args.seed).to(device)
        model = train(model, size, text.training, args.seconds, args.seed, print_to_stderr, not args.eager)
        model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        model.save_pretrained(learnt)
    models.prepare(model, settings, "pruned")
    ids = documents(text.held_out, size.context, args.documents).to(device)
    of_run = {
        "size": f"{sum(p.numel() for p in model.parameters()) / 1e6:.2g} M parameters",
        "seed": args.seed,
        "head_dim": size.head_dim,
        "context": size.context,
        "training_steps": model.config.training_steps,
        "training_seconds": round(args.seconds, 1),
    } | study.about(where, " ".join([COMMAND, *args.given]), model)
    from cute_kernels.eval.decoding import prefilled

    first = prefilled(model, ids[:, : -size.scored])
    dense = bits_a_byte(model, settings[0], ids, first)
    for number, setting in enumerate(missing, 1):
        found = dense if setting.is_dense else bits_a_byte(model, setting, ids, first)
        (value, error), (over, over_error) = mean(found.tolist()), mean((found - dense).tolist())
        row = results.row(setting, "text", "bits a byte", value, ids.shape[0] * size.scored) | of_run
        bits = round(study.bits_per_element(setting, size.head_dim), 3)
        kept.add([row | {"bits": bits, "error": error, "over": over, "over_error": over_error}])
        if number % 5 == 0 or number in (1, len(missing)):
            print_to_stderr(
                f"[{number}/{len(missing)}] {setting.name}, {bits:.2f} bits an element: {value:.4f} bits a byte, "
                f"{over:+.4f} ± {over_error:.4f}"
            )


def bits_a_byte(model: Any, setting: Setting, ids: Tensor, first: Any) -> Tensor:
    """Of what follows `first` in each document, float64 on the CPU. ids: (documents, context). first: as `prefilled`
    gives it of their beginning."""
    from cute_kernels.eval.decoding import losses

    found = losses(model, models.cache_maker(model, setting), ids, first.tokens, CHUNK, first)
    return found.double().mean(1).cpu() / math.log(2)


def documents(books: Sequence[bytes], context: int, count: int) -> Tensor:
    """`count` stretches of `context` bytes, (count, context) int64, spread evenly over those that the books have.

    Raises ValueError if they have fewer.
    """
    found = [book[i : i + context] for book in books for i in range(0, len(book) - context + 1, context)]
    if len(found) < count:
        raise ValueError(f"books that are held out have {len(found)} documents of {context} bytes, fewer than {count}")
    chosen = [found[i * len(found) // count] for i in range(count)]
    return torch.stack([torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in chosen])


def build(size: Size, seed: int) -> Any:
    """The model, with random weights, float32."""
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    return llama.build(size, seed, 256, size.context, rope_parameters=rope)


def train(
    model: Any,
    size: Size,
    books: Sequence[bytes],
    seconds: float,
    seed: int,
    say: Callable[[str], None],
    graphs: bool = True,
) -> Any:
    """For `seconds`, on stretches of books that begin anywhere. Returns the model; its config says the steps.

    graphs: whether a GPU runs steps as CUDA graphs.
    """
    device = model.device
    text = torch.frombuffer(bytearray(b"\0".join(books)), dtype=torch.uint8).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    step_of = Steps(model, (0.9, 0.95), 0.1, graphs)
    model.train()
    start, step, done, average = time.perf_counter(), 0, 0.0, None
    while done < 1:
        step += 1
        length = size.short if done < size.short_share else size.context
        batch = max(1, size.tokens // length)
        begin = torch.randint(len(text) - length, (batch, 1), generator=generator, device=device)
        ids = text[begin + torch.arange(length + 1, device=device)].long()
        cosine = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
        rate = size.learning_rate * cosine * min(1.0, step / WARM_UP)
        loss, _ = step_of(ids[:, :-1], ids[:, 1:], rate)
        if step % 10 == 0 or device.type == "cpu":  # else the GPU waits for the host
            bits = loss.item() / math.log(2)
            average = bits if average is None else 0.9 * average + 0.1 * bits
            took = time.perf_counter() - start
            done = took / seconds
            if step % 100 == 0 or done >= 1:
                read = step * size.tokens / took
                say(f"step {step}, {took:.0f} of {seconds:g} s, {read:.3g} bytes/s: {average:.3f} bits a byte")
    model.config.training_steps = step
    return model.eval()


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(COMMAND, __doc__)
    options.add_training(parser, 120.0)
    add = parser.add_argument
    add("--quick", action="store_true", help="a smaller model and shorter documents")
    add(
        "--documents",
        type=command_line.positive_integer,
        default=48,
        metavar="N",
        help="to evaluate on, at a time (default: %(default)s)",
    )
    add("--seed", type=command_line.seed, default=0, metavar="N", help="of weights and order (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
