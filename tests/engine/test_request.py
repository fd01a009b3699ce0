"""The request layer: prompts, parameters and ids; results are joined by sequence id. Refusals: ``test_refusals.py``."""

from array import array

import numpy as np
import pytest
import torch
from helpers import refuses
from leaks import finish

from nanovllm import RequestError, SamplingParams


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


def test_edited_after_submission(small_llm):
    """The caller's object is the caller's: a request under way kept on reading it."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    request = small_llm.add_request([5, 6], params)
    params.max_tokens, params.temperature = 1, -1.0
    finished = finish(small_llm)
    assert len(finished[request]) == 3
    with refuses("temperature=-1.0 must be a finite number"):
        small_llm.add_request([5, 6], params)


def test_equal_parameters_share_a_snapshot(small_llm):
    """Equal in values and types: True was taken for the 1 of the request before. None is the caller's object."""
    every = [SamplingParams(max_tokens=1, stop_token_ids=[7]) for _ in range(3)] + [SamplingParams(max_tokens=2)]
    requests = small_llm._inputs.make_all([[5]] * 4, every)
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
    forward = llm.model_runner.forward
    llm.model_runner.forward = lambda batch: [buffer.fill(9) for buffer in buffers] and forward(batch)
    outputs = llm.generate([*buffers, range(3)][: 4 + mixed], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs[:4]] == [[5, 6, i] for i in range(4)]
