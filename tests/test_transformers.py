"""SparseKVCache in Transformers' generate: the tokens of sdpa where nothing is pruned, and where something is those of
dense tensors that were pruned by the tests' own rule."""

from __future__ import annotations

import copy

import oracle
import pytest
import torch
from plain_kv_cache import PlainKVCache

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from cute_kernels.integrations.transformers import SparseKVCache, _layer
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cute_kernels import KVCache

HEAD_DIM = 16
PROMPT, NEW = 100, 40  # with a window of 8, a tile before the first new token and one among the new ones

CONFIGS = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
    "gemma": ("Gemma", {"head_dim": 256, "num_key_value_heads": 1}),
}


class RoundingAttention:
    """sdpa in float32 from float16 to float16, as a cache of float16 computes: what is left between two runs is the
    order of float32 sums, and now and then a value rounded otherwise. noise: a relative error on top, more than that."""

    def __init__(self):
        self.noise = 0.0

    def __call__(self, module, query, key, value, mask, **kwargs):
        operands = (x.half().float() for x in (query, key, value))
        out, weights = sdpa_attention_forward(module, *operands, mask, **kwargs)
        return self.shake(out).half().float(), weights

    def shake(self, out):
        generator = torch.Generator().manual_seed(out.numel())  # samplers keep theirs
        return out * (1 + self.noise * torch.randn(out.shape, generator=generator)) if self.noise else out


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors: waiting for threads is most of what several would do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    rounding = RoundingAttention()
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", rounding)
    return rounding


def make(name="llama", dtype=torch.float32, **changes):
    kind, own = CONFIGS[name]
    shape = {
        "vocab_size": 89,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**shape | own | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)
    assert model.config._attn_implementation == "sdpa"
    return model


def sparse(model, **options):
    head_dim = model.config.head_dim
    options = {"keep": head_dim, "window": 8, "dtype": torch.float16} | options
    return SparseKVCache(model.config, **options)


def prompts(lengths=(PROMPT,), width=None):
    """Left-padded: (ids, mask)."""
    width = width or max(lengths)
    ids = torch.randint(1, 89, (len(lengths), width))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokens(model, inputs, cache, seed=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    with torch.random.fork_rng(enabled=seed is not None):  # further inputs are drawn from another sequence
        if seed is not None:
            torch.manual_seed(seed)
        return model.generate(**inputs, past_key_values=cache, **options)


def assert_same_tokens(attention, draw, run, caches, counts=lambda cache: True):
    """Draws inputs until their answer does not hang on the last bits of a near tie, then compares the answers.

    draw() -> inputs. run(inputs, cache) -> tokens. caches: makers of the expected and of the tested cache, for inputs.
    counts: whether the tested cache, once used, is to be compared. Returns the inputs and the tested cache.
    """
    missed = 0  # one in a thousand hangs on a near tie all the same
    for _ in range(40):
        inputs = draw()
        expected = run(inputs, caches[0](inputs))
        attention.noise = 5e-4  # of every value: as if all were rounded otherwise
        shaken = run(inputs, caches[0](inputs))
        attention.noise = 0.0
        if torch.equal(shaken, expected):
            cache = caches[1](inputs)
            found = run(inputs, cache)
            if torch.equal(found, expected) and counts(cache):
                return inputs, cache
            missed += counts(cache)
            assert missed < 2, (found, expected)
    pytest.fail("every answer hung on a near tie")


def assert_sdpa_tokens(attention, draw, seed=None, kept=None, **options):
    """Generates with a DynamicCache and with a SparseKVCache that keeps everything. draw() -> (model, prompts)."""

    def run(drawn, cache):
        return tokens(*drawn, cache, seed, **options)

    return assert_same_tokens(attention, draw, run, (dense, lambda drawn: sparse(drawn[0], **kept or {})))


def dense(drawn):
    return DynamicCache(config=drawn[0].config)


# ---- Nothing pruned: the tokens of sdpa ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_sdpa(rng, attention, name):
    lengths = (PROMPT, rng.randrange(1, PROMPT), 1)
    _, cache = assert_sdpa_tokens(attention, lambda: (make(name), prompts(lengths)))
    assert cache.get_seq_length() == PROMPT + NEW - 1
    for layer in cache.layers:
        assert layer.kv.lengths.tolist() == [length + NEW - 1 for length in lengths]  # padding never entered


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        {"prefill_chunk_size": 48},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_ways_to_generate_give_the_tokens_of_sdpa(rng, attention, options, padded):
    lengths = (PROMPT, rng.randrange(1, 90)) if padded else (PROMPT,) * 2
    assert_sdpa_tokens(attention, lambda: (make(), prompts(lengths)), seed=rng.randrange(2**31), **options)


@pytest.mark.parametrize("window", [0, 8, 64])
def test_prompt_lookup_gives_the_tokens_of_sdpa(rng, attention, window):
    def draw():
        ids = torch.randint(1, 89, (1, 20)).repeat(1, 5)  # repeats itself: candidates are found, and rejected
        return make(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    options = {"prompt_lookup_num_tokens": 5, "eos_token_id": 0}  # Transformers 5.0 looks for an end in any case
    assert_sdpa_tokens(attention, draw, kept={"window": window}, max_new_tokens=80, **options)


def test_turns_on_one_cache_give_the_tokens_of_sdpa(rng, attention):
    """The second turn's prompt is long and padded on its left, in the midst of what is cached."""

    def run(drawn, cache):
        model, *turns = drawn
        ids, mask = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)
        for turn in turns:
            inputs = {
                "input_ids": torch.cat([ids, turn["input_ids"]], dim=1),
                "attention_mask": torch.cat([mask, turn["attention_mask"]], dim=1),
            }
            ids = tokens(model, inputs, cache)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, NEW, dtype=torch.long)], dim=1)
        return ids

    def draw():
        return make(), prompts((PROMPT, 60)), prompts((70, rng.randrange(1, 70))), prompts((3, 2))

    assert_same_tokens(attention, draw, run, (dense, lambda drawn: sparse(drawn[0])))


def test_answers_masked_after_their_end_leave_the_cache(rng, attention):
    """A row that ended early was fed padding; the next turn's mask says so."""
    window = rng.choice([8, 64])

    def run(drawn, cache):
        model, first, more, ended = drawn
        answer = tokens(model, first, cache)
        said = torch.ones(2, NEW, dtype=torch.long)
        said[1, ended:] = 0
        inputs = {
            "input_ids": torch.cat([answer, more["input_ids"]], dim=1),
            "attention_mask": torch.cat([first["attention_mask"], said, more["attention_mask"]], dim=1),
        }
        return tokens(model, inputs, cache)

    def draw():
        return make(), prompts((PROMPT, 60)), prompts((30, 20)), rng.randrange(1, NEW)

    caches = dense, lambda drawn: sparse(drawn[0], window=window)
    (*_, ended), cache = assert_same_tokens(attention, draw, run, caches)
    assert cache.layers[0].kv.lengths.tolist() == [PROMPT + 2 * NEW + 30 - 1, 60 + ended + 20 + NEW - 1]


def test_a_longer_answer_than_there_was_room_for(rng, attention):
    answer = _layer.HEADROOM + 30

    def draw():
        return make(num_hidden_layers=1), prompts((5,))

    _, cache = assert_sdpa_tokens(attention, draw, max_new_tokens=answer)
    assert cache.get_seq_length() == 5 + answer - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_logits_of_16_bit_models(rng, dtype, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model, inputs = make(dtype=dtype), prompts((PROMPT, 30))
    answer = torch.randint(1, 89, (2, NEW))
    found = []
    for cache in (DynamicCache(config=model.config), sparse(model, dtype=None)):
        logits = [forward(model, cache, inputs["input_ids"], inputs["attention_mask"])]
        for i in range(NEW):
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, i + 1, dtype=torch.long)], dim=1)
            logits.append(forward(model, cache, answer[:, i : i + 1], mask))
        found.append(torch.stack(logits))
    expected, got = found
    assert (got - expected).norm() / expected.norm() < {torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


def forward(model, cache, ids, mask=None):
    """Logits of the last token, (B, vocabulary) float32; without padding positions need no mask."""
    with torch.no_grad():
        position_ids = None
        if mask is not None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache).logits[:, -1].float()


# ---- Pruned: the tokens of dense tensors pruned by the tests ---------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"sparsity": 0.7}, {"key_keep": 12, "value_keep": 5}, {"keep": 6, "window": 0}, {"keep": 6, "window": 100}],
    ids=str,
)
def test_pruned_tokens_are_those_of_dense_pruned_tensors(rng, attention, options, monkeypatch):
    """One layer: what it caches comes from the tokens alone, so that both caches prune the same values."""
    lengths, made = (PROMPT, rng.randrange(1, PROMPT)), []

    class Plain(PlainKVCache):
        def attend(self, q, **options):
            return attention.shake(super().attend(q, **options))

    def cache_of(kind, model):
        def make_one(**sizes):
            made.append(kind(**sizes))
            return made[-1]

        monkeypatch.setattr(_layer, "KVCache", make_one)
        return sparse(model, **{"keep": None} | options)

    def draw():
        return make(num_hidden_layers=1), prompts(lengths)

    def run(drawn, cache):
        return tokens(*drawn, cache, max_new_tokens=80)

    caches = lambda drawn: cache_of(Plain, drawn[0]), lambda drawn: cache_of(KVCache, drawn[0])
    # Tokens that repeat themselves without end are alike in the values they keep, which no slot has room for.
    untrimmed = lambda cache: not any(value for name, value in made[-1].statistics().items() if "trimmed" in name)
    assert_same_tokens(attention, draw, run, caches, untrimmed)
    plain, tested = made[-2:]
    for row in range(2):
        assert all(oracle.same_bits(*pair) for pair in zip(tested.dense(row), plain.dense(row)))


def test_a_pruned_cache_is_smaller(rng):
    model = make(num_key_value_heads=4, head_dim=64)
    cache = sparse(model, keep=None, sparsity=0.7, capacity=2048)
    tokens(model, prompts((2000,)), cache, max_new_tokens=3)
    assert cache.nbytes() < 0.6 * 2 * 2 * 2048 * 4 * 64 * 2  # layers, keys and values, tokens, heads, channels, bytes


# ---- What else is asked of a cache -----------------------------------------------------------------------------------


def test_crop_takes_back_the_newest_tokens(rng):
    model = make()
    ids = torch.randint(1, 89, (2, 180))
    for removed in (1, 8, 9, 75, 179):
        cache = sparse(model)
        forward(model, cache, ids)
        cache.crop(torch.tensor(-removed))
        assert cache.get_seq_length() == 180 - removed
        got = forward(model, cache, ids[:, 180 - removed : 180 - removed + 1])
        expected = forward(model, DynamicCache(config=model.config), ids[:, : 180 - removed + 1])
        assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)
    cache.crop(2)  # all but two, as it is before Transformers 5.18
    assert cache.get_seq_length() == 2
    cache.crop(0)
    assert cache.get_seq_length() == 2


def test_crop_of_padded_rows(rng):
    model, inputs = make(), prompts((PROMPT, 10))
    cache = sparse(model)
    forward(model, cache, **ids_and_mask(inputs))
    cache.crop(-95)  # the second row's tokens all go, and 85 columns of padding
    assert cache.layers[0].kv.lengths.tolist() == [5, 0]
    mask = inputs["attention_mask"][:, :6].clone()
    mask[:, 5] = 1
    got = forward(model, cache, inputs["input_ids"][:, -1:], mask)
    whole = torch.cat([inputs["input_ids"][:, :5], inputs["input_ids"][:, -1:]], dim=1)
    expected = forward(model, DynamicCache(config=model.config), whole, mask)
    assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)


def ids_and_mask(inputs):
    return {"ids": inputs["input_ids"], "mask": inputs["attention_mask"]}


def test_rows_are_repeated_and_selected(rng):
    """A prompt's cache made once, copied and used for several answers."""
    model, inputs = make(), prompts((PROMPT, 40))
    shared = sparse(model)
    forward(model, shared, **ids_and_mask(inputs))
    new = torch.randint(1, 89, (6, 1))
    cache = copy.deepcopy(shared)
    cache.batch_repeat_interleave(3)
    rows = torch.arange(2).repeat_interleave(3)
    mask = torch.cat([inputs["attention_mask"][rows], torch.ones(6, 1, dtype=torch.long)], dim=1)
    got = forward(model, cache, new, mask)
    whole = torch.cat([inputs["input_ids"][rows], new], dim=1)
    assert torch.allclose(got, forward(model, DynamicCache(config=model.config), whole, mask), atol=1e-2, rtol=1e-2)

    for picked in (torch.tensor([4, 0, 3]), torch.arange(6) == 5):
        chosen = copy.deepcopy(cache)
        chosen.batch_select_indices(picked)
        ones = torch.ones(len(mask[picked]), 1, dtype=torch.long)
        got = forward(model, chosen, new[picked], torch.cat([mask[picked], ones], dim=1))
        longer = torch.cat([whole[picked], new[picked]], dim=1)
        expected = forward(model, DynamicCache(config=model.config), longer, torch.cat([mask[picked], ones], dim=1))
        assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)
    assert shared.layers[0].kv.lengths.tolist() == [PROMPT, 40]


def test_reset_makes_room_for_another_batch(rng, attention):
    model = make()
    cache = sparse(model)

    def emptied(drawn):
        cache.reset()
        assert cache.get_seq_length() == 0
        return cache

    def run(drawn, cache):
        return tokens(*drawn, cache, max_new_tokens=10)

    for lengths in ((PROMPT, 30), (20, 10), (5,), (PROMPT + 300, 1, 2)):
        assert_same_tokens(attention, lambda lengths=lengths: (model, prompts(lengths)), run, (dense, emptied))


def test_heads_are_counted_in_the_tensors(rng, attention):
    """A tensor parallel model has a share of its config's heads."""

    def of_a_whole(drawn):
        config = copy.deepcopy(drawn[0].config)
        config.num_attention_heads, config.num_key_value_heads = 16, 8
        cache = SparseKVCache(config, keep=HEAD_DIM, window=8, dtype=torch.float16)
        drawn[0].config._attn_implementation = config._attn_implementation
        return cache

    def run(drawn, cache):
        return tokens(*drawn, cache)

    _, cache = assert_same_tokens(attention, lambda: (make(), prompts((PROMPT, 3))), run, (dense, of_a_whole))
    assert cache.layers[0].kv.kv_heads == 2


def test_random_walks_through_the_cache(rng):
    """Any columns masked, crops, rows picked and repeated, ends of rows masked later: logits of every new token, against
    the row's tokens alone."""
    model = make(num_hidden_layers=2)
    cache = sparse(model, window=rng.choice([0, 8, 40]))
    rows, columns = [[] for _ in range(3)], torch.zeros(3, 0, dtype=torch.bool)
    for _ in range(40):
        step = rng.choice(["feed"] * 6 + ["one"] * 6 + ["crop", "select", "repeat", "end", "reset"])
        seen = columns.shape[1]
        if step == "reset" and rng.random() < 0.5:
            cache.reset()
            rows, columns = [[] for _ in range(3)], torch.zeros(3, 0, dtype=torch.bool)
        elif step == "crop" and seen:
            left = seen - rng.randrange(min(seen, 90) + 1)
            cache.crop(left - seen)
            columns = columns[:, :left]
        elif step == "select" and seen:
            picked = torch.tensor([rng.randrange(len(rows)) for _ in range(rng.randrange(1, 5))])
            cache.batch_select_indices(picked)
            columns, rows = columns[picked], [list(rows[i]) for i in picked]
        elif step == "repeat" and seen and len(rows) < 4:
            cache.batch_repeat_interleave(2)
            columns, rows = columns.repeat_interleave(2, 0), [list(row) for row in rows for _ in range(2)]
        elif step == "end" and seen:
            columns = columns.clone()
            columns[rng.randrange(len(rows)), rng.randrange(seen) :] = False
        rows = [row[: int(count)] for row, count in zip(rows, columns.sum(1))]
        if step in ("feed", "one"):
            new = rng.choice([1, 2, 5, 20, 90]) if step == "feed" else 1
            ids = torch.randint(1, 89, (len(rows), new))
            fresh = torch.rand(len(rows), new) < (rng.choice([0.7, 2]) if step == "feed" else 2)
            if rng.random() < 0.5:
                fresh = fresh.sort(1).values  # padding on the left
            columns = torch.cat([columns, fresh], dim=1)
            positions = (columns.cumsum(1) - 1).clamp(min=0)[:, -new:]
            with torch.no_grad():
                got = model(ids, attention_mask=columns.long(), position_ids=positions, past_key_values=cache).logits
                for i, row in enumerate(rows):
                    row += ids[i, fresh[i]].tolist()
                    if row:
                        expected = model(torch.tensor([row])).logits[0, len(row) - int(fresh[i].sum()) :]
                        assert torch.allclose(got[i, fresh[i]], expected, atol=1e-2, rtol=1e-2)
            for layer in cache.layers:
                assert layer.kv.lengths.tolist() == [len(row) for row in rows]
        assert cache.get_seq_length() == columns.shape[1]


def test_the_readme_s_line(rng, monkeypatch):
    """A model in 16 bits, nothing else said."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model, inputs = make(dtype=torch.bfloat16, head_dim=64), prompts((PROMPT, 12))
    answer = model.generate(**inputs, past_key_values=SparseKVCache(model.config, sparsity=0.7), max_new_tokens=NEW)
    assert answer.shape == (2, PROMPT + NEW)


def test_a_saved_model_knows_nothing_of_the_cache(rng, tmp_path):
    model = make()
    SparseKVCache(model, keep=4, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    assert "sparse_kv" not in (tmp_path / "config.json").read_text()
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_other_caches_are_served_as_before(rng):
    model, inputs = make(), prompts((PROMPT, 30))
    before = tokens(model, inputs, None)
    with torch.no_grad():
        logits = model(**inputs).logits
    SparseKVCache(model, keep=4, dtype=torch.float16)
    assert model.config._attn_implementation == "sparse_kv"
    assert torch.equal(tokens(model, inputs, None), before)
    assert torch.equal(tokens(model, inputs, None, cache_implementation="static"), before)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)
    model.set_attn_implementation("sdpa")
    assert torch.equal(tokens(model, inputs, None), before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_greedy_tokens_of_16_bit_models(rng, dtype, device, monkeypatch):
    """The likeliest tokens after all those before, or as likely within the rounding of 16 bits."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model = make("qwen3", dtype=dtype, head_dim=128).to(device)
    inputs = {name: x.to(device) for name, x in prompts((200, 120, 7)).items()}
    answer = tokens(model, inputs, sparse(model, dtype=None, window=32), max_new_tokens=110)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer[:, 200:])], dim=1)
    with torch.no_grad():
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(answer, attention_mask=mask, position_ids=position_ids).logits[:, 199:-1].float()
    chosen = logits.gather(2, answer[:, 200:, None])[..., 0]
    assert (logits.amax(2) - chosen).max() < {torch.float16: 0.05, torch.bfloat16: 0.3}[dtype] * logits.std()
    beams = tokens(model, inputs, sparse(model, dtype=None), num_beams=3)
    assert beams.shape == (3, 200 + NEW)
