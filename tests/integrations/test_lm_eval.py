"""lm-evaluation-harness: answers and scores with everything kept against those of its dense model, with tokens pruned
against a dense cache with zeros; the command on tasks of local JSON files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT, tiny_tokenizer

pytest.importorskip("lm_eval.models.huggingface", reason="lm_eval is not installed (extra lm_eval)")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import DynamicCache

import cute_kernels as ck
from cute_kernels.integrations.lm_eval import NAME, SparseKVLM
from cute_kernels.integrations.lm_eval._support import check_found
from tests.support.tiny_models import HEAD_DIM, make

TILE, WINDOW = 64, 8
KEPT = {"keep": HEAD_DIM, "window": WINDOW, "cache_dtype": "float16"}
TEXT = "In a small town by the sea there lived a keeper of the light. "

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*default `max_length`:UserWarning"),
]


def talker(**changes):
    return make(
        vocab_size=len(tiny_tokenizer.CHARACTERS),
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        **changes,
    )


def models(batch_size=1, **options):
    """The harness's and ours, of the same weights."""
    model, tokenizer = talker(), tiny_tokenizer.make()
    arguments = {"tokenizer": tokenizer, "batch_size": batch_size}
    return HFLM(model, **arguments), SparseKVLM(model, **arguments, **KEPT | options)


def instances(kind, arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


# ---- Everything kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_is_that_of_the_dense_model(rng, attention, batch_size):
    dense, sparse = models(batch_size)
    compared = 0
    for attempt in range(10):  # text that hangs on the last bits of a near tie is not compared
        prompts = [(f"{attempt} " + TEXT * 4)[: rng.randrange(20, 240)] for _ in range(7)]
        options = {"until": ["e", "\n"], "max_gen_toks": 90}
        requests = instances("generate_until", [(prompt, options) for prompt in prompts])
        expected = dense.generate_until(requests, disable_tqdm=True)
        attention.noise = 5e-4
        shaken = dense.generate_until(requests, disable_tqdm=True)
        attention.noise = 0.0
        found = sparse.generate_until(requests, disable_tqdm=True)
        stable = [i for i in range(len(prompts)) if shaken[i] == expected[i]]
        compared += len(stable)
        assert [found[i] for i in stable] == [expected[i] for i in stable]
        if compared >= 10:
            return
    pytest.fail("every text hung on a near tie")


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_log_likelihoods_are_those_of_the_dense_model(rng, attention, chunk):
    dense, sparse = models(chunk=chunk)
    contexts = [(f"{i} " + TEXT * 20)[: rng.choice([2, 30, 150, 400, 600])] for i in range(4)]  # of 512 at most
    pairs = [(context, answer) for context in contexts for answer in ("y", "n", " nobody", TEXT, "")]
    greedy = dense.generate_until(
        instances("generate_until", [(contexts[0][:400], {"until": [], "max_gen_toks": 1})]), disable_tqdm=True
    )
    pairs = [pair for pair in pairs if pair[1]] + [(contexts[0][:400], text) for text in greedy if text.strip()]
    rng.shuffle(pairs)
    requests = instances("loglikelihood", pairs)
    expected = dense.loglikelihood(requests, disable_tqdm=True)
    found = sparse.loglikelihood(requests, disable_tqdm=True)
    assert [each[0] for each in found] == pytest.approx([each[0] for each in expected], rel=2e-3, abs=2e-2)
    assert sum(a[1] != b[1] for a, b in zip(found, expected)) <= 1  # a near tie


def test_log_likelihoods_of_long_texts(rng, attention):
    dense, sparse = models()
    requests = instances("loglikelihood_rolling", [(TEXT * count,) for count in (1, 3, 20)])  # of 512 tokens at most
    expected = dense.loglikelihood_rolling(requests, disable_tqdm=True)
    found = sparse.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-3)


# ---- Elements pruned -------------------------------------------------------------------------------------------------


def test_log_likelihoods_are_of_the_pruned_cache(rng, attention):
    """Beside a dense cache with zeros; no further tile leaves the window."""
    dense, sparse = models(keep=4, chunk=5)
    model, tokenizer = sparse.model, sparse.tokenizer
    context, answers = (TEXT * 3)[:121], [" yes", " no", " nobody knows", "?"]
    requests = instances("loglikelihood", [(context, each) for each in answers])
    found, unpruned = (each.loglikelihood(requests, disable_tqdm=True) for each in (sparse, dense))
    assert any(abs(a[0] - b[0]) > 0.1 for a, b in zip(found, unpruned))
    ids = tokenizer(context, return_tensors="pt").input_ids
    for answer, (likelihood, _) in zip(answers, found):
        cache, further = DynamicCache(), tokenizer(answer, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
            for layer in cache.layers:
                for name in ("keys", "values"):
                    x = getattr(layer, name).half()
                    x[:, :, :TILE] = ck.prune(x[:, :, :TILE].contiguous(), keep=4)
                    setattr(layer, name, x.float())
            logits = model(torch.cat([ids[:, -1:], further[:, :-1]], dim=1), past_key_values=cache).logits
        expected = logits.log_softmax(-1).gather(2, further[..., None]).sum().item()
        assert likelihood == pytest.approx(expected, rel=2e-3, abs=2e-2)


def test_scores_do_not_depend_on_other_requests(rng):
    _, sparse = models(keep=4)
    pairs = [((f"{i} " + TEXT * 5)[:200], answer) for i in range(2) for answer in (TEXT * 2, "y", TEXT * 2, "n")]
    together = sparse.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    alone = [sparse.loglikelihood(instances("loglikelihood", [pair]), disable_tqdm=True)[0] for pair in pairs]
    assert together == alone and together[0] == together[2]


def test_text_comes_from_the_pruned_cache(rng):
    dense, sparse = models(keep=2)
    request = instances("generate_until", [(TEXT * 4, {"until": [], "max_gen_toks": 60})])
    texts = [model.generate_until(request, disable_tqdm=True) for model in (dense, sparse)]
    assert texts[0] != texts[1]


def test_beams_and_samples(rng):
    _, sparse = models(2)
    for options in ({"num_beams": 3}, {"do_sample": True, "temperature": 0.8}):
        arguments = [(TEXT * 2, {"until": ["\n"], "max_gen_toks": 20} | options), (TEXT, {"until": ["\n"]} | options)]
        assert len(sparse.generate_until(instances("generate_until", arguments), disable_tqdm=True)) == 2


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sparsity": 1.5, "keep": None}, ValueError, "sparsity must be from 0 to 1, got 1.5"),
        ({"sparsty": 0.5}, TypeError, "SparseKVLM has no option sparsty"),
        (
            {"cache_dtype": "half precision"},
            ValueError,
            "cache_dtype must be float16 or bfloat16, got 'half precision'",
        ),
        ({"cache_dtype": None}, ValueError, "the model computes in float32"),
        ({"cache_backend": "sm12"}, ValueError, "backend must be one of"),
        ({"key_rule": "think"}, ValueError, "think"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"chunk": 1.5}, TypeError, "chunk must be an integer, got float"),
    ],
    ids=str,
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        SparseKVLM(talker(), tokenizer=tiny_tokenizer.make(), **KEPT | options)


def test_another_attention_implementation_is_refused():
    model = talker()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'sdpa' attention, the model has 'eager'"):
        SparseKVLM(model, tokenizer=tiny_tokenizer.make(), **KEPT)


# ---- The command, with folders and local tasks -----------------------------------------------------------------------

TASK = """\
task: needles
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/needles.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{input}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def folder(tmp_path, attention):
    """model/, tasks/needles.yaml and needles.jsonl with answers of the dense model that hang on no near tie."""
    model, tokenizer = talker(), tiny_tokenizer.make()
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    dense = HFLM(model, tokenizer=tokenizer)
    prompts = [(f"{i} " + TEXT * 3)[:170] for i in range(20)]
    requests = instances("generate_until", [(each, {"until": ["\n"], "max_gen_toks": 8}) for each in prompts])
    answers = dense.generate_until(requests, disable_tqdm=True)
    attention.noise = 5e-4
    shaken = dense.generate_until(requests, disable_tqdm=True)
    attention.noise = 0.0
    rows = [{"input": prompt, "answer": a} for prompt, a, b in zip(prompts, answers, shaken) if a == b and a.strip()]
    assert len(rows) >= 8
    (tmp_path / "needles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "needles.yaml").write_text(TASK.format(folder=tmp_path))
    return tmp_path


def offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def test_a_model_by_name(folder, monkeypatch):
    offline(monkeypatch)
    arguments = {"pretrained": str(folder / "model"), "device": "cpu"} | KEPT
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=NAME, model_args=arguments, tasks=["needles"], task_manager=tasks, bootstrap_iters=0
    )
    assert (
        results["results"]["needles"]["exact_match,none"] >= 0.75
    )  # now and then one hangs on a near tie all the same
    with pytest.raises(TypeError, match="sparsty"):
        lm_eval.simple_evaluate(
            model=NAME, model_args=arguments | {"sparsty": 0.5}, tasks=["needles"], task_manager=tasks
        )


def test_the_command(folder, monkeypatch):
    offline(monkeypatch)
    command = [
        *(sys.executable, "-m", "cute_kernels.integrations.lm_eval", "run", "--model", NAME),
        *(
            "--model_args",
            f"pretrained={folder / 'model'},sparsity=0.5,window=8,cache_dtype=float16",
            "--device",
            "cpu",
        ),
        *("--tasks", "needles", "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out")),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("out/**/results_*.json")
    found = json.loads(path.read_text())
    assert math.isfinite(found["results"]["needles"]["exact_match,none"])
    assert found["config"]["model"] == NAME and "sparsity" in str(found["config"]["model_args"])


# ---- Versions --------------------------------------------------------------------------------------------------------


def test_an_older_harness_is_refused():
    with pytest.raises(ImportError, match=r"serves lm_eval 0\.4\.12 and later, found 0\.4\.11"):
        check_found("0.4.11")


@pytest.mark.parametrize("found", ["0.4.14", "0.5.0", "of unknown version"])
def test_a_newer_harness_is_tried_with_a_warning(found):
    with pytest.warns(UserWarning, match=f"tested with lm_eval 0.4.12 to 0.4.13, found {found}"):
        check_found(found)


def test_tested_versions(recwarn):
    check_found("0.4.12")
    check_found("0.4.13")
    assert not recwarn
