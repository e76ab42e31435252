"""A small server of one model over HTTP: continuous batching on compressed pages.

    python -m cute_kernels.integrations.transformers.serve --model FOLDER --memory 8G --sparsity 0.7

POST /v1/completions takes {"prompt": text or token ids, "max_tokens": 16} and answers when the request is complete, as
OpenAI's completions do, with the new token ids beside the text; GET /health says whether the model runs. For trials
behind a trusted network: no authentication, no streaming, greedy decoding.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cute_kernels.integrations.transformers.batching import SparseKVBatching

_MOST_BYTES = 16 << 20  # of a request
_UNITS = {"M": 1 << 20, "G": 1 << 30}


class Completions:
    """Hands requests of many threads to a manager, and its results back."""

    def __init__(self, manager: SparseKVBatching, tokenizer: Any, vocabulary: int) -> None:
        self._manager, self._tokenizer, self._vocabulary = manager, tokenizer, vocabulary
        self._waiting: dict[str, queue.Queue[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._deliver, daemon=True).start()

    @property
    def running(self) -> bool:
        return self._manager.is_running()

    def complete(self, job: Any) -> dict[str, Any]:
        """The answer to a request. ValueError says what is wrong with it, RuntimeError that the model failed."""
        tokens, most = self._tokens(job), job.get("max_tokens", 16)
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ValueError(f"max_tokens must be a positive integer, got {most!r}")
        arrived: queue.Queue[Any] = queue.Queue()
        with self._lock:  # before the result can come
            name = self._manager.add_request(tokens, max_new_tokens=most)
            if name is None:
                raise RuntimeError("the model does not run any more")
            self._waiting[name] = arrived
        while True:
            try:
                result = arrived.get(timeout=1)
                break
            except queue.Empty:
                if not self.running:
                    raise RuntimeError("the model does not run any more") from None
        if result.error is not None:
            raise RuntimeError(result.error)
        new = result.generated_tokens
        choice = {
            "index": 0,
            "text": None if self._tokenizer is None else self._tokenizer.decode(new, skip_special_tokens=True),
            "tokens": new,
            "finish_reason": "length" if len(new) >= most else "stop",
        }
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(new), "total_tokens": len(tokens) + len(new)}
        return {"id": name, "object": "text_completion", "choices": [choice], "usage": usage}

    def _tokens(self, job: Any) -> list[int]:
        if not isinstance(job, dict) or not job.get("prompt"):
            raise ValueError('a request must be an object with a "prompt", text or token ids')
        prompt = job["prompt"]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("prompt must be token ids: the model has no tokenizer")
            prompt = self._tokenizer(prompt)["input_ids"]
        if not isinstance(prompt, list) or not all(
            type(token) is int and 0 <= token < self._vocabulary for token in prompt
        ):
            raise ValueError(f"prompt must be text or a list of token ids from 0 to {self._vocabulary - 1}")
        return prompt

    def _deliver(self) -> None:
        while self.running:
            result = self._manager.get_result(timeout=0.1)
            if result is not None and result.is_finished():
                with self._lock:
                    waiting = self._waiting.pop(result.request_id)
                waiting.put(result)


def make_server(completions: Completions, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health":
                self._answer(404, {"error": "there is POST /v1/completions and GET /health"})
            elif completions.running:
                self._answer(200, {"status": "ok"})
            else:
                self._answer(503, {"error": "the model does not run any more"})

        def do_POST(self) -> None:
            if self.path != "/v1/completions":
                self._answer(404, {"error": "there is POST /v1/completions and GET /health"})
                return
            try:
                size = int(self.headers.get("Content-Length", ""))
                if not 0 <= size <= _MOST_BYTES:
                    raise ValueError(f"a request must have at most {_MOST_BYTES} bytes, got {size}")
                self._answer(200, completions.complete(json.loads(self.rfile.read(size))))
            except ValueError as error:
                self._answer(400, {"error": str(error)})
            except RuntimeError as error:
                self._answer(500, {"error": str(error)})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """One line a request is more than a benchmark wants."""

    return ThreadingHTTPServer((host, port), Handler)


def memory_size(text: str) -> int:
    """Bytes of a number with a unit, such as 512M or 8G."""
    if text[-1:] not in _UNITS or not text[:-1].isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number with M or G behind it, such as 8G, got {text!r}")
    return int(text[:-1]) * _UNITS[text[-1]]


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m cute_kernels.integrations.transformers.serve")
    arguments.add_argument("--model", required=True, help="a folder, or a name that Transformers knows")
    arguments.add_argument("--memory", required=True, type=memory_size, help="for the cache, such as 8G")
    arguments.add_argument("--requests", type=int, default=64, help="at most, under way (default: %(default)s)")
    arguments.add_argument("--sparsity", type=float, default=0.7, help="(default: %(default)s)")
    arguments.add_argument("--codec", metavar="NAME", help="of nonzeros, such as int8 (default: of the model's dtype)")
    arguments.add_argument("--window", type=int, default=32, help="dense tokens at least (default: %(default)s)")
    arguments.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    return arguments


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).to(options.device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError):
        tokenizer = None  # prompts are token ids
    chosen = GenerationConfig.from_model_config(model.config)
    chosen.do_sample = False
    sizes = {"sparsity": options.sparsity, "codec": options.codec, "window": options.window}
    sizes["requests"] = options.requests
    manager = SparseKVBatching(model.eval(), memory=options.memory, generation_config=chosen, **sizes)
    manager.warmup()
    with manager:
        vocabulary = model.config.get_text_config().vocab_size
        server = make_server(Completions(manager, tokenizer, vocabulary), options.host, options.port)
        print(f"serving on http://{options.host}:{server.server_address[1]}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.server_close()


if __name__ == "__main__":
    main()
