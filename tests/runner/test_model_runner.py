"""One step in flight: what arrives and what stops while the device works, and what a decode step sends."""

import pytest
from helpers import DEVICES, generate, greedy, prompt_of, record_calls, run_ahead


@pytest.mark.parametrize("device", DEVICES)
def test_prefix_hit_on_a_prefill_in_flight(make_llm, reference, device):
    """A prompt arrives while the launch that fills its prefix's blocks still runs: a hit, for launches run in order."""
    llm, prompt = run_ahead(make_llm(device=device)), prompt_of(40)
    ids, finished, processed = [llm.add_request(prompt, greedy(6))], {}, []
    llm.step()
    assert llm.scheduler.num_in_flight == 1
    ids.append(llm.add_request(prompt, greedy(6)))
    while not llm.is_finished():
        done, num_tokens = llm.step()
        finished.update(done)
        processed.append(num_tokens)
    assert [n for n in processed if n > 0] == [40, 8]
    assert finished == dict.fromkeys(ids, reference(prompt, 6))


@pytest.mark.parametrize("device", DEVICES)
def test_stop_token_known_one_step_late(make_llm, reference, device):
    """The surplus token sampled after a stop appeared in the output, or in the request slot's next owner."""
    prompts = [prompt_of(n) for n in (9, 10, 11, 12)]
    stops = [reference(prompt, 12)[i] for prompt, i in zip(prompts, (2, 5, 0, 7), strict=True)]
    llm = run_ahead(make_llm(device=device, max_num_seqs=2))
    outputs = llm.generate(prompts, [greedy(12, stop_token_ids=[stop]) for stop in stops], use_tqdm=False)
    for prompt, stop, output in zip(prompts, stops, outputs, strict=True):
        tokens = reference(prompt, 12)
        assert output["token_ids"] == tokens[: tokens.index(stop) + 1]
        assert (output["finish_reason"], output.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_sends_only_changes(make_llm, device):
    """In the middle of a block the host sends nothing, or it could not run ahead of the device."""
    llm = run_ahead(make_llm(device=device))
    sent = record_calls(llm.model_runner, "write", argument=1)
    launched = record_calls(llm.model_runner.decode, "run")
    generate(llm, [prompt_of(n) for n in (3, 14, 20)], greedy(60))
    assert len(launched) == 59
    updates = [tensors for tensors in sent if tensors and "input_ids" not in tensors]
    assert all(tensors.keys() == {"state_indices", "state_values"} for tensors in updates)
    sizes = [len(tensors["state_values"]) for tensors in updates]
    # the batch, at first all of its positions; then a block for each 16 tokens of each sequence
    assert sizes[0] >= 3 and len(sizes) <= 1 + 3 * 4 and max(sizes[1:]) <= 3
