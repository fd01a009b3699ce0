"""``embed``, ``classify`` and ``rerank`` against transformers' hidden states and logits, in fp32 within 1e-5."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from helpers import OnUpdate, generate, greedy, run_ahead, use_graphs_on_cpu
from leaks import check_is_empty
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from nanovllm import LLM, CheckpointError, EngineError, RequestError
from nanovllm.contrib.as_vllm import llm as as_vllm
from nanovllm.utils.checkpoint import DEMO_MODEL
from nanovllm.verbs.sentence_transformers import read_pooling, read_texts

TOLERANCE = 1e-5
KINDS = {"last": "lasttoken", "mean": "mean", "cls": "cls"}


def prompt_of(length, seed=0):
    return np.random.default_rng((length, seed)).integers(2, 128, length).tolist()


SHARED = prompt_of(40, 1)
# two with the same blocks at the beginning; one of a block exactly, one longer than a launch
PROMPTS = [prompt_of(n) for n in (1, 16, 17, 130)] + [[*SHARED, 3, 4], [*SHARED, 5], SHARED[:33], prompt_of(7)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """transformers' model, and its checkpoint, by the kind of pooling."""
    path = tmp_path_factory.mktemp("qwen3")
    model = families.make(path, "qwen3")
    paths = {kind: with_modules(path, tmp_path_factory.mktemp(kind), mode) for kind, mode in KINDS.items()}
    return model, {**paths, "": str(path)}


def with_modules(path, to, mode="lasttoken", modules=("Transformer", "Pooling", "Normalize"), **more):
    """A copy of a checkpoint with sentence-transformers' files."""
    to = shutil.copytree(path, to, dirs_exist_ok=True)
    entries = [{"idx": i, "path": f"{i}_{name}" * (i > 0), "type": f"sentence_transformers.models.{name}"}
               for i, name in enumerate(modules)]  # fmt: skip
    (to / "modules.json").write_text(json.dumps(entries))
    (to / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    flags |= {flag: True for flag in flags if flag.removesuffix("_token").removesuffix("_tokens")[13:] == mode}
    (to / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 80, **flags, **more}))
    return str(to)


@torch.inference_mode()
def states_of(model, ids):
    """Hidden states after the last norm, fp32 [n, C]."""
    return getattr(model, "model", model)(torch.tensor([ids])).last_hidden_state[0].numpy()


def pooled(model, ids, kind="last"):
    states = states_of(model, ids)
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]


def normalized(state):
    return state / np.linalg.norm(state)


def check(outputs, model, prompts=PROMPTS, kind="last"):
    assert len(outputs) == len(prompts)
    for i, (output, ids) in enumerate(zip(outputs, prompts, strict=True)):
        assert np.abs(output.embedding - normalized(pooled(model, ids, kind))).max() < TOLERANCE
        assert output.embedding.dtype == np.float32 and output.outputs.embedding == output.embedding.tolist()
        assert (output.index, output.prompt_token_ids, output.finished) == (i, ids, True)


@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers(kind, qwen3, make_llm):
    """In chunks; the second time with a warm prefix cache, which serves only what needs no hidden states of what it
    holds."""
    model, paths = qwen3
    llm = make_llm(model=paths[kind], num_kvcache_blocks=64)
    for turn in range(2):
        outputs = llm.embed(PROMPTS)
        check(outputs, model, kind=kind)
        check_is_empty(llm)
        assert outputs[3].num_cached_tokens == (128 if turn and kind == "last" else 0)
    check(llm.embed(PROMPTS[3]), model, PROMPTS[3:4], kind)  # one prompt, alone


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_of_nan_are_an_error(kind, options, qwen3, make_llm, caplog):
    """They were an embedding of NaN, without a word. The other prompts go on."""
    model, paths = qwen3
    llm = run_ahead(make_llm(model=paths[kind], num_kvcache_blocks=64, **options))
    bad = 7
    good = [[i for i in prompt if i != bad] for prompt in PROMPTS]
    prompts = [*good, [*good[3], bad], [bad, *good[3]], [bad]]
    with torch.inference_mode():
        llm.model_runner.model.model.embed_tokens.weight[bad] = torch.nan
    fails = [kind != "cls", True, True]
    for _ in range(2):
        outputs = llm.embed(prompts)
        check(outputs[: len(good)], model, good, kind)
        assert [output.error is not None for output in outputs] == [False] * len(good) + fails
        for output in outputs:
            if output.error is not None:
                assert output.outputs is None and "hidden states of the prompt are NaN" in output.error
                with pytest.raises(EngineError, match=f"^prompt {output.index}: hidden states"):
                    output.embedding  # noqa: B018
        check_is_empty(llm)
    assert "hidden states of the prompt are NaN" in caplog.text
    assert llm.metrics()["request_success"]["error"] == 2 * sum(fails)


def test_norm_and_dimensions(qwen3, make_llm):
    model, paths = qwen3
    llm = make_llm(model=paths[""])
    state = pooled(model, PROMPTS[2])
    for options, expected in (
        ({"normalize": False}, state),
        ({"dimensions": 10}, normalized(state[:10])),
        ({"dimensions": 10, "normalize": False}, state[:10]),
        ({"dimensions": 80}, normalized(state)),
    ):
        (output,) = llm.embed([PROMPTS[2]], **options)
        assert output.embedding.shape == expected.shape and np.abs(output.embedding - expected).max() < TOLERANCE * 10


def test_a_checkpoint_without_normalize(qwen3, make_llm, tmp_path):
    """Its embeddings keep their length, unless a call asks for the norm."""
    model, paths = qwen3
    llm = make_llm(model=with_modules(paths[""], tmp_path, modules=("Transformer", "Pooling")))
    state = pooled(model, PROMPTS[2])
    assert np.abs(llm.embed([PROMPTS[2]])[0].embedding - state).max() < TOLERANCE * 10
    check(llm.embed(PROMPTS, normalize=True), model)


BARE = ["qwen3", "qwen2", "mistral-nemo", "llama-tied-biased", "granite", "gemma3", "mixtral", "qwen3.5", "lfm2",
        "falcon-h1", "nemotron-h"]


@pytest.mark.parametrize("case", BARE)
def test_decoders_without_a_head(case, make_llm, tmp_path):
    """Saved under the name of the decoder, or of the model it was taken from; such a model generates nothing."""
    model = families.make(tmp_path / "whole", case)
    model.model.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["architectures"][0].endswith("Model")
    check(make_llm(model=str(tmp_path / "whole")).embed(PROMPTS), model)
    for architecture in (config["architectures"][0], type(model).__name__):
        (tmp_path / "bare" / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        llm = use_graphs_on_cpu(make_llm(model=str(tmp_path / "bare")))
        check(llm.embed(PROMPTS), model)
        for refused in (lambda: llm.generate([[5, 6]], use_tqdm=False), lambda: llm.score([[5, 6]]),  # noqa: B023
                        lambda: llm.add_request([5, 6]), lambda: next(llm.stream([5, 6]))):  # noqa: B023  # fmt: skip
            with pytest.raises(RequestError, match="this model has no LM head, so it predicts no tokens"):
                refused()
        with pytest.raises(RequestError, match="neither a classification head nor an LM head"):
            llm.rerank("a", ["b"])
    state = states_of(model, PROMPTS[2])[-1]
    for path in ("whole", "bare"):
        (output,) = make_llm(model=str(tmp_path / path)).embed([PROMPTS[2]], normalize=False)
        assert np.abs(output.embedding - state).max() < TOLERANCE * np.abs(state).max()


@pytest.mark.parametrize("beside", ["adapter", "shard of the embedding"])
def test_a_decoder_without_a_head_in_several_files(beside, make_llm, tmp_path):
    """The first file by name held no decoder layer, so a tied model counted as one with a head."""
    model = families.make(tmp_path / "whole", "llama-tied-biased")
    model.model.save_pretrained(tmp_path / "bare")
    config, file = tmp_path / "bare" / "config.json", tmp_path / "bare" / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [type(model).__name__]}))
    if beside == "adapter":
        lora = {"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}
        save_file(lora, tmp_path / "bare" / "adapter_model.safetensors")
    else:
        tensors = load_file(file)
        embedding = {"embed_tokens.weight": tensors.pop("embed_tokens.weight")}
        for name, shard in (("model-00001-of-00002", embedding), ("model-00002-of-00002", tensors)):
            save_file(shard, tmp_path / "bare" / f"{name}.safetensors")
        file.unlink()
    llm = make_llm(model=str(tmp_path / "bare"))
    check(llm.embed(PROMPTS), model)
    with pytest.raises(RequestError, match="this model has no LM head"):
        llm.generate([[5, 6]], use_tqdm=False)


# -------------------------------------------------------------------- heads


def make_classifier(path, num_labels, **more):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(**{**families.BASE, **families.HEAD, "num_labels": num_labels, **more})
    model = Qwen3ForSequenceClassification._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(num_labels)
    for name, p in model.named_parameters():
        p.data.normal_(float("norm" in name), 0.15, generator=generator)
    model.save_pretrained(path)
    return model.eval()


@torch.inference_mode()
def logits_of(model, ids):
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("num_labels", "more", "activation"),
    [
        (3, {}, lambda x: x.softmax(-1)),
        (2, {"tie_word_embeddings": True}, lambda x: x.softmax(-1)),
        (1, {}, torch.sigmoid),
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (2, {"problem_type": "regression"}, lambda x: x),
    ],
)
def test_classify(num_labels, more, activation, make_llm, tmp_path):
    model = make_classifier(tmp_path, num_labels, **more)
    llm = make_llm(model=str(tmp_path), max_num_batched_tokens=50, tensor_parallel_size=2 if more == {} else 1)

    def check_all():
        for output, ids in zip(llm.classify(PROMPTS), PROMPTS, strict=True):
            expected = activation(logits_of(model, ids)).numpy()
            assert np.abs(output.outputs.probs - expected).max() < TOLERANCE and len(expected) == num_labels

    check_all()
    check(llm.embed(PROMPTS), model)
    model.score.weight.data.mul_(-2)
    llm.update_weights(model.named_parameters())
    check_all()
    if num_labels != 1:
        with pytest.raises(RequestError, match=f"rerank: this model has {num_labels} labels, not one"):
            llm.rerank("a", ["b"])


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A model that answers with one of two tokens, as in its original form and converted to one label."""
    from transformers import Qwen3ForCausalLM

    paths = [tmp_path_factory.mktemp(name) for name in ("original", "converted")]
    model = Qwen3ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    for path in paths:
        shutil.copytree(DEMO_MODEL, path, dirs_exist_ok=True)
    no, yes = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode("01").ids
    from transformers import Qwen3ForSequenceClassification

    converted = Qwen3ForSequenceClassification.from_pretrained(DEMO_MODEL, num_labels=1, dtype=torch.float32)
    converted.score.weight.data[0] = model.lm_head.weight[yes] - model.lm_head.weight[no]
    (paths[1] / "model.safetensors").unlink()
    converted.save_pretrained(paths[1])
    return model, [no, yes], paths


QUERY, DOCUMENTS = "what is 2 + 3?", ["5", "2 + 3 = {5}", "a cat", "", "prime numbers " * 20]


def check_scores(llm, reranker, **options):
    model, answers, _ = reranker
    template = "{query}\n{document}?"
    outputs = llm.rerank(QUERY, DOCUMENTS, template=template, tokens=("0", "1"), **options)
    for output, document in zip(outputs, DOCUMENTS, strict=True):
        assert output.prompt == f"{QUERY}\n{document}?"
        expected = logits_of(model, llm.tokenize([output.prompt])[0])[-1, answers].softmax(-1)[1]
        assert abs(output.outputs.score - float(expected)) < TOLERANCE
    return [output.outputs.score for output in outputs]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", [0, 1])
def test_rerank(form, ranks, reranker):
    with LLM(str(reranker[2][form]), device="cpu", dtype="float32", quiet=True, tensor_parallel_size=ranks) as llm:
        scores = check_scores(llm, reranker)
        each = llm.rerank([QUERY] * len(DOCUMENTS), DOCUMENTS, template="{query}\n{document}?", tokens=["0", "1"])
        assert [output.outputs.score for output in each] == pytest.approx(scores, abs=TOLERANCE)
        (plain,) = llm.rerank(QUERY, ["5"], instruction="X", tokens=("0", "1"))
        assert "<Instruct>: X\n<Query>: what is 2 + 3?\n<Document>: 5<|im_end|>" in plain.prompt


@pytest.mark.parametrize("form", [0, 1])
def test_rerank_with_weights_of_nan(form, reranker):
    with LLM(str(reranker[2][form]), device="cpu", dtype="float32", quiet=True) as llm:
        weights = llm.model_runner.model
        with torch.inference_mode():
            weights.model.norm.weight[3] = torch.nan
        outputs = llm.rerank(QUERY, DOCUMENTS, tokens=("0", "1"))
        assert all(output.outputs is None and "are NaN" in output.error for output in outputs)
        adapter = object.__new__(as_vllm.LLM)
        adapter.awake, adapter._adapt = lambda: llm, lambda _: None
        score, encode = partial(adapter.score, data_2=DOCUMENTS[:3]), partial(adapter.encode, pooling_task="embed")
        for method in (adapter.embed, score, encode):
            with pytest.raises(EngineError, match=r"^prompt 0: hidden states of the prompt are NaN"):
                method(QUERY, use_tqdm=False)
        with torch.inference_mode():
            (weights.lm_head if form == 0 else weights.score).weight[:, 2] = torch.nan
        with pytest.raises(EngineError, match="head hold NaN"):
            llm.rerank(QUERY, DOCUMENTS, tokens=("0", "1"))


def test_bars(reranker, capsys):
    """As in test_progress.py: of the verbs that need a head."""
    with LLM(str(reranker[2][1]), device="cpu", dtype="float32", quiet=True) as llm:
        documents = [text for text in DOCUMENTS if text]
        for verb, desc in ((partial(llm.rerank, QUERY), "Ranking"), (llm.classify, "Classifying")):
            bar = OnUpdate()
            capsys.readouterr()
            verb(documents, use_tqdm=bar)
            verb(documents, use_tqdm=False)
            assert verb([]) == [] and capsys.readouterr() == ("", "")
            assert (bar.options["total"], bar.options["desc"]) == (4, desc)
            verb(documents)
            assert f"\r{desc}: 100%" in capsys.readouterr().err


def test_label_tokens_of_the_checkpoint(reranker, tmp_path):
    """config.json of a converted model may name tokens of the LM head in place of a head."""
    more = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["0", "1"]}
    with LLM(families.copied(reranker[2][0], tmp_path, **more), device="cpu", dtype="float32", quiet=True) as llm:
        check_scores(llm, reranker)


# -------------------------------------------------------------------- texts


def test_texts_get_the_tokens_that_the_tokenizer_adds(tmp_path):
    """Qwen3-Embedding's appends <|endoftext|>, whose hidden state is the embedding."""
    path = shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)])
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(str(path), device="cpu", dtype="float32", quiet=True, max_num_seqs=4) as llm:
        texts = [f"{i} + {i}" for i in range(300)]  # two slices
        outputs = llm.embed(texts)
        assert [output.prompt for output in outputs] == texts
        assert all(output.prompt_token_ids[-1] == end for output in outputs)
        ids = [output.prompt_token_ids for output in outputs]
        again = llm.embed([{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids, strict=True)])
        assert np.abs(np.subtract([x.embedding for x in outputs], [x.embedding for x in again])).max() < TOLERANCE
        with pytest.raises(RequestError, match="prompt 299: the text cannot be encoded as UTF-8"):
            llm.embed([*texts[:299], "\ud800", "x"])
        assert llm.is_finished() and len(llm.embed(texts[:3])) == 3
        bar = OnUpdate()
        llm.embed(texts[:3], use_tqdm=bar)
        assert bar.options["total"] == 3


@pytest.fixture
def demo_with(tmp_path):
    """demo_with(fields of config_sentence_transformers.json, of the Transformer's file) -> a copy of the demo model."""

    def make(prompts, of_transformer, file="sentence_bert_config.json", folder=""):
        path = with_modules(DEMO_MODEL, tmp_path, mode="mean", modules=("Transformer", "Pooling"))
        modules = json.loads((tmp_path / "modules.json").read_text())
        modules[0]["path"] = folder
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).write_text(json.dumps(of_transformer))
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
        tokenizer.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[end])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return path

    return make


OF_QUERIES = {"prompts": {"query": "Count: ", "document": ""}, "default_prompt_name": "query"}
TEXT_5 = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
VERSION_5 = {
    "transformer_task": "feature-extraction", "modality_config": TEXT_5, "module_output_name": "token_embeddings",
    "unpad_inputs": False, "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}, "model_args": {},
}  # fmt: skip
FORMS_OF_TEXTS = {  # config_sentence_transformers.json, the Transformer's file, options of the call -> text, its tokens
    "default prompt": (OF_QUERIES, {}, {}, "Count: 1 + 22 IS Odd", None),
    "no default": ({**OF_QUERIES, "default_prompt_name": None}, {}, {}, "1 + 22 IS Odd", None),
    "instruction": (OF_QUERIES, {"max_seq_length": None}, {"instruction": "Add: "}, "Add: 1 + 22 IS Odd", None),
    "no instruction": (OF_QUERIES, {}, {"instruction": ""}, "1 + 22 IS Odd", None),
    "lower case": (OF_QUERIES, {"do_lower_case": True}, {}, "count: 1 + 22 is odd", None),
    "cut": ({}, {"max_seq_length": 5, "do_lower_case": False}, {}, "1 + 22 IS Odd", 5),
    "all": (OF_QUERIES, {"max_seq_length": 7, "do_lower_case": True}, {}, "count: 1 + 22 is odd", 7),
    "version 5": ({"model_type": "SentenceTransformer"}, VERSION_5, {}, "1 + 22 IS Odd", None),
}


@pytest.mark.parametrize("file", [("sentence_bert_config.json", ""), ("sentence_roberta_config.json", "0_Transformer")])
@pytest.mark.parametrize("case", FORMS_OF_TEXTS)
def test_settings_of_sentence_transformers(case, file, demo_with):
    """They were read by nobody. The special token behind a text stays where it is cut; token ids stay as they are."""
    prompts, of_transformer, options, text, length = FORMS_OF_TEXTS[case]
    path = demo_with(prompts, of_transformer, *file)
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    if length:
        tokenizer.enable_truncation(length)
    ids, plain = tokenizer.encode(text).ids, prompt_of(9)
    given = "1 + 22 IS Odd"
    with LLM(path, device="cpu", dtype="float32", quiet=True) as llm:
        mine = [given, {"prompt": given}, {"prompt": given, "prompt_token_ids": plain}, plain]
        outputs, (want, of_plain) = llm.embed(mine, **options), llm.embed([ids, plain])
    assert [output.prompt_token_ids for output in outputs] == [ids, ids, plain, plain]
    for output, expected in zip(outputs, [want, want, of_plain, of_plain], strict=True):
        assert np.abs(output.embedding - expected.embedding).max() < TOLERANCE


@pytest.mark.parametrize(
    ("prompts", "of_transformer", "said"),
    [
        ({"default_prompt_name": "passage"}, {}, "default_prompt_name='passage' must be one of [] or None."),
        ({**OF_QUERIES, "default_prompt_name": ["query"]}, {}, "default_prompt_name=['query'] must be one of"),
        ({"prompts": {"query": 3}}, {}, "prompts={'query': 3} must be an object of texts or None."),
        ({}, {"max_seq_length": "512"}, "max_seq_length='512' must be an integer >= 1 or None."),
        ({}, {"max_seq_length": 0}, "max_seq_length=0 must be an integer >= 1 or None."),
        ({}, {"do_lower_case": "no"}, "do_lower_case='no' must be True or False or None."),
        ({}, {"transformer_task": "text-generation"}, "transformer_task='text-generation' must be None or 'feature-e"),
        ({}, {"module_output_name": "causal_logits"}, "module_output_name='causal_logits' must be None or 'token_em"),
        ({}, {"modality_config": {"message": TEXT_5["text"]}}, "must be an object with \"text\": {'method': 'forward'"),
        ({}, {"processing_kwargs": {"text": {"max_length": 9}}}, 'must be an object without "common" and "text"'),
        ({}, {"query_expansion": {"strategy": "fixed"}}, "query_expansion={'strategy': 'fixed'} must be None (others"),
        ({}, {"document_length": 180}, "document_length=180 must be None (others are not supported)."),
        ({}, {"config_args": {"is_causal": False}}, "config_args={'is_causal': False} must be an object with no more"),
        ({"truncate_dim": 0}, {}, "truncate_dim=0 must be an integer >= 1 or None."),
    ],
)
def test_damaged_settings_of_sentence_transformers(prompts, of_transformer, said, demo_with):
    path = demo_with(prompts, of_transformer)
    with LLM(path, device="cpu", quiet=True) as llm, pytest.raises(CheckpointError, match=re.escape(said)):
        llm.embed("1 + 1")


def test_fields_of_sentence_transformers_5(demo_with):
    """It has the length of texts in tokenizer_config.json; texts that it would cut at their beginning are refused."""
    path = Path(demo_with({"truncate_dim": 24}, {}))
    config = path / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"model_max_length": 5}
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.enable_truncation(5)
    ids = tokenizer.encode("1 + 22 IS Odd").ids
    for side in ("right", "left"):
        config.write_text(json.dumps({**fields, "truncation_side": side}))
        with LLM(str(path), device="cpu", quiet=True) as llm:
            assert len(llm.embed("1")[0].embedding) == 24 and len(llm.embed("1", dimensions=32)[0].embedding) == 32
            if side == "right":
                assert llm.embed("1 + 22 IS Odd")[0].prompt_token_ids == ids and len(ids) == 5
                continue
            with pytest.raises(RequestError, match="Those over model_max_length=5 would be cut at its beginning"):
                llm.embed(["1", "1 + 22 IS Odd"])


@pytest.mark.parametrize("name", ["../other", "{outside}", "1_Pooling/../../other", "link", 7, ["1_Pooling"], "a\0b"])
@pytest.mark.parametrize("module", [0, 1])
def test_modules_outside_the_checkpoint(module, name, qwen3, tmp_path):
    """Their values were read, and quoted."""
    path, outside = tmp_path / "checkpoint", tmp_path / "other"
    with_modules(qwen3[1][""], path)
    outside.mkdir()
    (outside / "config.json").write_text('{"pooling_mode": "secret"}')
    (path / "link").symlink_to(outside)
    modules = json.loads((path / "modules.json").read_text())
    modules[module]["path"] = str(outside) if name == "{outside}" else name
    (path / "modules.json").write_text(json.dumps(modules))
    for read in (read_pooling, read_texts):
        with pytest.raises(CheckpointError, match=r"modules\.json: .* must be the path of a folder within the check"):
            read(str(path))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"0": {}}', "[[]]", "[", "\xff"])
def test_damaged_modules(content, qwen3, tmp_path):
    with_modules(qwen3[1][""], tmp_path)
    (tmp_path / "modules.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"modules\.json (cannot be read|holds no (JSON list|list of mod))"):
        read_pooling(str(tmp_path))


# -------------------------------------------------------------------- errors


def test_rerank_refused():
    with LLM(device="cpu", quiet=True) as llm:
        for arguments, options, said in (
            (("q", "d"), {}, "documents must be a list of strings, not d."),
            (("q", ["d", 5]), {}, "document 1 must be a string, not 5."),
            ((["q", "r"], ["d"]), {}, "2 queries but 1 documents; give one, or as many."),
            (("q", ["d"]), {"template": "{question}"}, "template='{question}' may have {query}, {document} and"),
            (("q", ["d"]), {"tokens": ("yes", "no")}, "tokens=('yes', 'no') must be two texts of one token each"),
            (("q", ["d"]), {"tokens": ("0", "0")}, "tokens=('0', '0') must be two texts of one token each"),
        ):
            with pytest.raises(RequestError, match=re.escape(said)):
                llm.rerank(*arguments, **{"tokens": ("0", "1"), **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "max"}, "pooling pooling_mode_max_tokens is not supported, only one of lasttoken, cls, mean."),
        ({"mode": "none"}, "pooling without a mode is not supported"),
        ({"modules": ("Transformer", "Pooling", "Dense")}, "module 'Dense' is not supported"),
        ({"mode": "mean", "include_prompt": False}, "include_prompt=false is not supported"),
        ({"pooling_mode": "weightedmean"}, "pooling weightedmean is not supported"),
        ({"pooling_mode": [["mean"]]}, "pooling ['mean'] is not supported"),
        ({"pooling_mode": [{"mean": 1}]}, "pooling {'mean': 1} is not supported"),
        ({"pooling_mode": ["mean", "cls"]}, "pooling mean + cls is not supported"),
    ],
)
def test_pooling_that_is_not_supported(options, said, qwen3, make_llm, tmp_path):
    """The model generates all the same."""
    llm = make_llm(model=with_modules(qwen3[1][""], tmp_path, **options))
    with pytest.raises(CheckpointError, match=re.escape(said)):
        llm.embed([[5]])
    assert generate(llm, [[5]], greedy(1))
