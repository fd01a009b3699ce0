"""The request layer: prompts, parameters and ids; results are joined by sequence id. Refusals: ``test_refusals.py``."""

import re
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import generate
from leaks import finish

from nanovllm import RequestError, SamplingParams
from nanovllm.engine.callers import Caller, run
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.scheduler import SequenceTable
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.token_processor import TokenProcessors


def refuses(text):
    return pytest.raises(RequestError, match=re.escape(text))


@pytest.mark.parametrize("prompt", [[], [512], 5, None, [1] * 128, {"prompt": "hi"}, "hi", {1, 2}])
def test_refused_by_add_request(small_llm, prompt):
    with pytest.raises(RequestError):
        small_llm.add_request(prompt)
    assert small_llm.is_finished()


@pytest.mark.parametrize("params", [{"temperature": 0.5}, {}, [], 0, ""])
def test_sampling_params_refused_by_add_request(small_llm, params):
    """Falsy values, {} for one, passed for no parameters."""
    with refuses(f"sampling_params must be a SamplingParams, not {type(params).__name__}."):
        small_llm.add_request([1], params)
    assert small_llm.is_finished()


def test_accepted_containers(small_llm):
    """Any ordered iterable of integers will do."""
    ids = [
        [0, 1, 2], (0, 1, 2), range(3), iter([0, 1, 2]), array("i", [0, 1, 2]), [np.int64(0), np.uint8(1), 2],
        np.array([0, 1, 2]), np.ma.array([0, 1, 2], mask=False),
    ]  # fmt: skip
    ids.append(torch.tensor([0, 1, 2]))
    for prompts in (ids, iter([(0, 1, 2)]), {(0, 1, 2): None}.keys(), torch.tensor([0, 1, 2]), torch.arange(3).int()):
        outputs = small_llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        assert outputs and all(output.prompt_token_ids == [0, 1, 2] for output in outputs)


def test_the_users_own_error(small_llm):
    """A TypeError of the user's own generator came out as a RequestError about the prompt's form."""

    def ids():
        yield 1
        raise TypeError("the user's own")

    for use in (small_llm.add_request, lambda prompt: small_llm.generate([prompt]), small_llm.generate):
        with pytest.raises(TypeError, match="the user's own"):
            use(ids())
    assert small_llm.is_finished()


def test_refused_requests_draw_nothing(make_llm):
    """The good prompts of a refused call were counted, which changed the seeds of later requests."""
    results = []
    for refused in ([], [[3], [4], []]):
        llm = make_llm()
        if refused:
            with refuses("prompt 2: the prompt is empty"):
                llm.generate(refused, use_tqdm=False)
            with refuses("the prompt is empty"):
                llm.add_request([])
        outputs = llm.generate([[5, 6]] * 2, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        results.append([(output.request_id, output["token_ids"]) for output in outputs])
        assert llm.add_request([5, 6]) == 2
    assert results[0] == results[1]
    assert results[0][0][1] != results[0][1][1]


def test_a_request_of_two_sequences():
    """Joined by sequence id, in the order of the request whichever ends first; complete when both are."""
    config = SimpleNamespace(
        max_model_len=64, kvcache_block_size=16, seed=0, max_logprobs=20,
        model_config=SimpleNamespace(vocab_size=512, has_lm_head=True),
    )
    tokenizer, caller = AsyncTokenizer("", skip=True, trust_remote_code=False), Caller()
    processors = TokenProcessors(config, tokenizer, (1,))
    inputs, outputs = InputProcessor(config, 8, tokenizer, processors), OutputProcessor(tokenizer, processors)
    prompt = {"prompt": "p", "prompt_token_ids": [5, 6]}
    request = inputs.make(prompt, SamplingParams(max_tokens=1, n=2))
    outputs.register(request, caller)
    table = SequenceTable(2, 64)
    inputs.make_completions(request)
    for i, seq in enumerate(request.seqs):
        table.add(seq)
        table.tokens[seq.req_idx, 2], table.num_tokens[seq.req_idx] = 7 + i, 3
        table.remove(seq)
        seq.finish_reason = "length"
    outputs.queued(request)
    outputs.finish([request.seqs[1]])
    assert list(caller.unfinished) == [0] and not caller.finished
    outputs.finish([request.seqs[0]])
    assert not caller.unfinished and list(caller.finished) == [request]
    output = request.output()
    assert [(c.index, c.token_ids) for c in output.outputs] == [(0, [7]), (1, [8])]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("0", "p", [5, 6])
    assert inputs.make([5], SamplingParams()).request_id == 2


def sequences_of(llm, prompt, params):
    request = llm._inputs.make(prompt, params)
    llm._inputs.make_completions(request)
    return request.seqs


def test_seeds_of_completions(small_llm):
    """As vLLM's: completion i of a request with a seed is the completion of a request with ``seed + i``."""

    def seeds(**params):
        return [seq.seed for seq in sequences_of(small_llm, [5], SamplingParams(**params))]

    assert seeds(seed=7, n=3) == [*seeds(seed=7), *seeds(seed=8), *seeds(seed=9)]
    assert len(set(seeds(n=3))) == 3


@pytest.mark.parametrize(
    ("params", "num_kept", "max_tokens"),
    [({}, 9, 64), ({"truncate_prompt_tokens": 4}, 4, 64), ({"truncate_prompt_tokens": 20}, 9, 64),
     ({"max_tokens": None}, 9, 97 - 9), ({"max_tokens": None, "truncate_prompt_tokens": 1}, 1, 97 - 1)],
)  # fmt: skip
def test_what_the_request_layer_resolves(small_llm, params, num_kept, max_tokens):
    """The last tokens of the prompt are kept; max_tokens=None is what max_model_len and the KV cache (97) leave."""
    given = SamplingParams(**params)
    (seq,) = sequences_of(small_llm, list(range(9)), given)
    assert seq.prompt_token_ids == list(range(9 - num_kept, 9))
    assert seq.sampling_params.max_tokens == max_tokens and given.max_tokens == params.get("max_tokens", 64)


def test_truncated_to_max_model_len(small_llm):
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
    prompt = small_llm._inputs.make(list(range(200)), SamplingParams(max_tokens=0, truncate_prompt_tokens=-1))
    assert prompt.prompt_ids.tolist() == list(range(73, 200))
    with refuses("need 8 KV blocks"):
        small_llm._inputs.make(list(range(200)), params)


def test_edited_after_submission(small_llm):
    """The caller's object is the caller's: a request under way kept on reading it."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    request = small_llm.add_request([5, 6], params)
    params.max_tokens, params.temperature = 1, -1.0
    finished = finish(small_llm)
    assert len(finished[request]) == 3
    with refuses("temperature=-1.0 must be a finite number"):
        small_llm.add_request([5, 6], params)


def test_one_warning_of_a_cut(make_llm, caplog):
    """max_tokens=32768 ended at max_model_len without a word."""
    llm = make_llm(max_model_len=32)
    generate(llm, [[5, 6]] * 2, SamplingParams(max_tokens=40, ignore_eos=True))
    text = "max_tokens=40 is cut to 30 by max_model_len=32 (the prompt has 2 tokens). This is said once."
    assert [record.getMessage() for record in caplog.records if "is cut to" in record.getMessage()] == [text]


def test_abort(make_llm):
    """An aborted request is forgotten wherever it is; the others go on, and nothing of it is left."""
    llm = make_llm(max_num_seqs=2, max_num_batched_tokens=16)
    ids = [llm.add_request([5] * n, SamplingParams(max_tokens=6, ignore_eos=True)) for n in (3, 40, 4, 5)]
    llm.step()
    for request_id in (ids[1], str(ids[3]), 99):  # half computed, waiting, unknown
        llm.abort(request_id)
    finished = finish(llm)
    assert finished.keys() == {ids[0], ids[2]}
    assert llm.scheduler.block_manager.num_available == len(llm.scheduler.block_manager.blocks)


def test_requests_come_out_as_they_finish(small_llm):
    """The seam of streaming: the loop yields a request as soon as it is finished, and an abort drops the others."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 4)]
    requests = small_llm._inputs.make_all([(None, [5]), (None, [6]), (None, [7])], params)
    assert [request.index for _, finished in run(small_llm, requests) for request in finished] == [1, 2, 0]


def test_equal_parameters_share_a_snapshot(small_llm):
    """Equal in values and types: True was taken for the 1 of the request before. None is the caller's object."""
    every = [SamplingParams(max_tokens=1, stop_token_ids=[7]) for _ in range(3)] + [SamplingParams(max_tokens=2)]
    requests = small_llm._inputs.make_all([(None, [5])] * 4, every)
    first, *others = [request.params for request in requests]
    assert [params is first for params in others] == [True, True, False]
    assert first == every[0] and first is not every[0] and others[2].max_tokens == 2
    for wrong in (True, 1.0, np.int64(0)):
        every[1].min_tokens = 1
        every[2].min_tokens = wrong
        if isinstance(wrong, np.int64):
            assert len(small_llm.generate([[5]] * 3, every[:3], use_tqdm=False)) == 3
            continue
        with refuses(f"prompt 2: SamplingParams: min_tokens={wrong!r} must be an integer"):
            small_llm.generate([[5]] * 3, every[:3], use_tqdm=False)


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_are_copied(make_llm, mixed):
    """Requests are made while others run: an array that its owner fills again meanwhile is not theirs any more."""
    llm, buffers = make_llm(max_num_seqs=1), [np.array([5, 6, i]) for i in range(4)]
    run = llm.model_runner.forward

    def overwritten(batch):
        for buffer in buffers:
            buffer[:] = 9
        return run(batch)

    llm.model_runner.forward = overwritten
    outputs = llm.generate([*buffers, range(3)][: 4 + mixed], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs[:4]] == [[5, 6, i] for i in range(4)]
