"""Training loops: log-probabilities are those of the trainer's forward pass, rewards rise."""

import importlib.util
import json
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICES, Reference, prompt_of, run_python
from histories import nightly

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_of_sampled_tokens_are_the_trainers(device, mode, make_llm, make_checkpoint):
    """Of the weights that were pushed last, in fp32 within 1e-4; with processed_logprobs at the temperature. ``score``
    gives those at temperature 1."""
    trainer = Reference(make_checkpoint(), device=device).model
    llm = make_llm(device=device, dtype="float32", logprobs_mode=mode, max_logprobs=0)
    params = SamplingParams(n=4, temperature=0.7, seed=1, max_tokens=12, logprobs=0, ignore_eos=True)
    prompts = [prompt_of(20), prompt_of(33, seed=1)]
    seen = []
    for _ in range(2):
        for output in llm.generate(prompts, params, use_tqdm=False):
            start = len(output.prompt_token_ids)
            lists = [output.prompt_token_ids + completion.token_ids for completion in output.outputs]
            logits = trainer(torch.tensor(lists, device=device)).logits[:, start - 1 : -1].float().cpu()
            sampled = torch.tensor(lists)[:, start:, None]
            expected = {
                temperature: (logits / temperature).log_softmax(-1).gather(-1, sampled)[..., 0]
                for temperature in (1.0, 0.7)
            }
            got = torch.tensor([[p.logprob for at in c.logprobs for p in at.values()] for c in output.outputs])
            want = expected[0.7 if mode == "processed_logprobs" else 1.0]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
            scores = torch.tensor([score.logprobs for score in llm.score(lists, start=start)])
            torch.testing.assert_close(scores, expected[1.0], rtol=0, atol=1e-4)
            seen.append(got)
        with torch.no_grad():
            for param in trainer.parameters():
                param.mul_(1 + 0.2 * torch.randn(param.shape, generator=torch.Generator().manual_seed(3)).to(device))
        llm.update_weights(trainer.named_parameters())
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.gpu
def test_logprobs_in_bfloat16(make_llm, make_checkpoint):
    """Of engine and trainer in bf16: the difference that importance weights correct. Stated, not exact."""
    trainer = Reference(make_checkpoint(), torch.bfloat16, "cuda").model
    llm = make_llm(device="cuda", dtype="bfloat16")
    params = SamplingParams(n=16, seed=1, max_tokens=32, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt_of(20)], params, use_tqdm=False)
    lists = torch.tensor([output.prompt_token_ids + c.token_ids for c in output.outputs], device="cuda")
    with torch.no_grad():
        logprobs = trainer(lists).logits[:, 19:-1].float().log_softmax(-1)
    want = logprobs.gather(-1, lists[:, 20:, None])[..., 0].cpu()
    got = torch.tensor([[p.logprob for at in c.logprobs for p in at.values()] for c in output.outputs])
    assert (got - want).abs().mean() < 0.05


def test_grpo_example():
    """Twelve steps take the reward from about 0.4 to 1."""
    lines = run_python("examples/grpo.py", "--seed", "0", timeout=540).stdout.splitlines()
    curve = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", "\n".join(lines))]
    differences = [float(line.split()[-1]) for line in lines]
    assert len(curve) == len(lines) == 12
    assert curve[0] < 0.6 and sum(curve[-3:]) / 3 > 0.85 and max(curve[-3:]) > 0.95, curve
    assert max(differences) < 1e-4, "each step samples with the weights of the step before"


@nightly
def test_trl(tmp_path):
    """Real steps of GRPOTrainer: with chats and with texts, sleeping between rollouts."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("needs trl, and that Python 3.11")
    lines = run_python("tests/trl_rollouts.py", tmp_path, timeout=540).stdout.splitlines()
    results = [json.loads(line) for line in lines if line.startswith('{"rewards"')]
    assert len(results) == 2
    for result in results:
        assert len(result["rewards"]) == 2 and result["moved"] > 1e-5 and result["difference"] < 1e-4, result


ARGS = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
        "max_completion_length": 5, "generation_kwargs": None, "chat_template_kwargs": None}  # fmt: skip


def trainer_of(model, **changes):
    """What ``rollout_func`` reads of a GRPOTrainer."""
    return SimpleNamespace(
        model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(**{**ARGS, **changes}), tools=changes.get("tools"),
    )  # fmt: skip


def test_rollouts_without_trl():
    """Weights are pushed once for each step; what cannot be honoured is refused. A second ``train`` begins at step 0
    again, and if the first had pushed at step 0 only, it sampled with the weights from before the first.
    """
    from nanovllm.integrations.trl import rollout_func

    model = Reference(str(DEMO_MODEL)).model
    with LLM(device="cpu", num_kvcache_blocks=64, logprobs_mode="processed_logprobs", quiet=True) as llm:
        pushes, push = [], llm.update_weights
        llm.update_weights = lambda pairs: pushes.append(1) or push(pairs)
        rollout, trainer = rollout_func(llm), trainer_of(model, generation_kwargs={"max_tokens": 3, "seed": 1})
        chats = [[{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "c"}]] * 2
        for step in (0, 0, 1):
            trainer.state.global_step = step
            out = rollout(chats, trainer)
            assert [len(ids) for ids in out["completion_ids"]] == [len(x) for x in out["logprobs"]]
            assert max(map(len, out["completion_ids"])) <= 3
            assert out["prompt_ids"][0] == llm.tokenizer.apply_chat_template(
                chats[0], continue_final_message=True, return_dict=False
            )
        assert len(pushes) == 2
        trainer.state = SimpleNamespace(global_step=1)  # as of another call of ``train``
        for _ in range(2):
            rollout(chats, trainer)
        assert len(pushes) == 3
        with pytest.raises(ConfigError, match="tools and adapters"):
            rollout(chats, trainer_of(model, tools=[print]))
    with LLM(device="cpu", num_kvcache_blocks=64, quiet=True) as llm:
        with pytest.raises(ConfigError, match=r'at temperature=0\.8 .* LLM\(logprobs_mode="processed_logprobs"\)'):
            rollout_func(llm)(chats, trainer_of(model))
        assert rollout_func(llm)(["x"], trainer_of(model, temperature=1.0))["completion_ids"]
