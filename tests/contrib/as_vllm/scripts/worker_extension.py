"""A trainer's methods in the worker, and functions sent to it."""

import sys
from types import ModuleType

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu_worker import Worker


class WorkerExtension:
    def update_weight(self, name, dtype, shape, empty_cache=False):
        weight = torch.zeros(shape, dtype=dtype, device=self.device)
        self.model_runner.model.load_weights(weights=[(name, weight)])
        return name

    def check_weights_changed(self):
        params = dict(self.model_runner.model.named_parameters())
        return (params["model.norm.weight"] == 0).all().item()


class OwnWorker(Worker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.group = "mine"

    def of_group(self, name):
        return self.group == name


module = sys.modules["trainer_extension"] = ModuleType("trainer_extension")
module.WorkerExtension, module.OwnWorker = WorkerExtension, OwnWorker
for worker_cls in (OwnWorker, "trainer_extension.OwnWorker"):
    llm = LLM(sys.argv[1], worker_cls=worker_cls)
    assert llm.collective_rpc("of_group", args=("mine",)) == [True]
with pytest.raises(ValueError, match=r"worker_cls=.* must be 'auto', or a class derived from vLLM's Worker"):
    LLM(sys.argv[1], worker_cls=WorkerExtension)
llm = LLM(sys.argv[1], worker_extension_cls="trainer_extension.WorkerExtension", enforce_eager=True, dtype="float32")
assert llm.collective_rpc("check_weights_changed") == [False]
args = ("model.norm.weight", torch.float32, torch.Size([256]), False)
assert llm.collective_rpc("update_weight", args=args) == ["model.norm.weight"]
assert llm.collective_rpc("check_weights_changed") == [True]
assert llm.collective_rpc(lambda worker, x: (worker.rank, x), args=(3,)) == [(0, 3)]
assert llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))[0] == 3_410_688
assert llm.llm_engine.collective_rpc("reload_weights") == [None]
params = SamplingParams(temperature=0)
for name, value in {"max_tokens": 4, "n": 1, "logprobs": 0, "top_k": -1}.items():
    assert hasattr(params, name)
    setattr(params, name, value)
(output,) = llm.chat([{"role": "user", "content": "2 + 3"}], params)
assert output.outputs[0].text == "5"
