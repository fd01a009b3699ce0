"""Four local tasks through the harness's ``hf`` model and through ours; prints what differs as JSON.

    python tests/contrib/integrations/run_lm_eval.py FOLDER       # FOLDER gets the tasks
"""

import contextlib
import json
import os
import random
import runpy
import shutil
import sys
from functools import partialmethod
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).resolve().parents[3]
DEMO = str(ROOT / "nanovllm" / "assets" / "demo")
NUM_DOCS, MAX_LENGTH = 60, 512
GENERATE = 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
EXACT = "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
TASKS = {
    # sums of three terms, which the model half knows: wrong choices differ from the right one by little
    "demo_choice": 'output_type: multiple_choice\ndoc_to_text: "{{question}}\\n"\ndoc_to_choice: "{{choices}}"\n'
    "doc_to_target: label\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},"
    " {metric: acc_norm, aggregation: mean, higher_is_better: true}]\n",
    "demo_chat": GENERATE + 'generation_kwargs: {until: ["."], max_gen_toks: 24}\n' + EXACT,
    # no chat template, so the model rambles; it stops in the middle of a text
    "demo_text": GENERATE + 'generation_kwargs: {until: ["e", ", 3"], max_gen_toks: 24, do_sample: false}\n' + EXACT,
    "demo_perplexity": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: \"{{text}}\"\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from make_demo import ask

    rng, docs = random.Random(0), {name: [] for name in TASKS}
    for i in range(NUM_DOCS):
        a, b, c = rng.randint(1, 9), rng.randint(1, 9), rng.choice([0, rng.randint(1, 9)])
        right = a + b + c
        choices = [str(right), str(right + 1), str(right - 2), str(right + 10)]
        rng.shuffle(choices)
        question = f"what is {a} + {b}" + (f" + {c}" if c else "")
        label = choices.index(str(right))
        docs["demo_choice"].append({"question": question, "choices": choices, "label": label})
        for name in ("demo_chat", "demo_text"):
            question, answer = ask(rng)
            docs[name].append({"question": question, "answer": answer.split(".")[0]})
        if i < 6:
            text = "\n".join(" ".join(ask(rng)) for _ in range(8))
            docs["demo_perplexity"].append({"text": text})
    docs["demo_perplexity"].append({"text": "\n".join(" ".join(ask(rng)) for _ in range(150))})
    for name, body in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs[name]))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + body + "metadata: {version: 0}\n")


def with_other_eos(folder: Path) -> str:
    """The demo model as if <|endoftext|> ended its texts; <|im_end|>, which does, is a special token as any other."""
    copy = folder / "model"
    shutil.copytree(DEMO, copy)
    for name, changes in {
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }.items():
        values = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**values, **changes}))
    return str(copy)


def command_line(folder: Path) -> dict:
    """The results of ``python -m nanovllm.integrations.lm_eval run ...``, in this process."""
    sys.argv = [
        "lm_eval", "run", "--model", "nanovllm",
        "--model_args", f"pretrained={DEMO},dtype=float32,max_num_seqs=16,quiet=True",
        "--tasks", "demo_choice", "--include_path", str(folder), "--limit", "10", "--device", "cpu",
        "--output_path", str(folder / "results.json"),
    ]  # fmt: skip
    from lm_eval.tasks import TaskManager

    # the harness's own tasks take it ten seconds to read
    TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)  # type: ignore[method-assign]
    runpy.run_module("nanovllm.integrations.lm_eval", run_name="__main__")
    (path,) = folder.glob("results*.json")
    return json.loads(path.read_text())["results"]["demo_choice"]


def main(folder: Path) -> dict:
    write_tasks(folder)
    report: dict = {"command_line": command_line(folder)}
    import lm_eval
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from nanovllm import EngineError

    NanoVLLM = get_model("nanovllm")
    manager = TaskManager(include_path=str(folder))
    models = {
        "hf": HFLM(pretrained=DEMO, dtype="float32", device="cpu", batch_size=16, max_length=MAX_LENGTH),
        "nanovllm": NanoVLLM(DEMO, dtype="float32", device="cpu", max_model_len=MAX_LENGTH, quiet=True),
    }
    report["num_tokens"] = max(len(models["nanovllm"].tok_encode(json.loads(line)["text"]))
                               for line in (folder / "demo_perplexity.jsonl").open())  # fmt: skip
    for name, model in models.items():
        results, samples = {}, {}
        for chat in (False, True):
            tasks = [task for task in TASKS if (task == "demo_chat") == chat]
            run = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0,
                                          apply_chat_template=chat, verbosity="ERROR")  # fmt: skip
            for task in tasks:
                results[task] = {
                    key: value for key, value in run["results"][task].items()
                    if isinstance(value, float) and "stderr" not in key
                }  # fmt: skip
                rows = sorted(run["samples"][task], key=lambda row: row["doc_id"])
                samples[task] = [row["resps"] for row in rows]
        report[name] = {"results": results, "samples": samples}
    # a special token as a stop; and a context that must be cut
    other = with_other_eos(folder)
    contexts = ["<|im_start|>user\n" + q + "<|im_end|>\n<|im_start|>assistant\n" for q in ("2 + 3", "spell zoo")]
    contexts.append("spell zoo\n" * 100)
    kwargs = {"until": ["<|im_end|>"], "max_gen_toks": 16}
    requests = [Instance("generate_until", {}, (context, kwargs), i) for i, context in enumerate(contexts)]
    report["special_stop"] = [
        HFLM(pretrained=other, dtype="float32", device="cpu", max_length=MAX_LENGTH).generate_until(requests),
        NanoVLLM(other, dtype="float32", device="cpu", max_model_len=MAX_LENGTH, quiet=True).generate_until(requests),
    ]
    # weights of NaN: the run ends
    ours, report["failures"] = models["nanovllm"], []
    with torch.inference_mode():
        ours.llm.model_runner.model.model.norm.weight[3] = torch.nan
    pairs = [Instance("loglikelihood", {}, ("2 + 3", text), i) for i, text in enumerate((" 5", " 6"))]
    for method, given in ((ours.generate_until, requests), (ours.loglikelihood, pairs)):
        try:
            method(given)
        except EngineError as error:
            report["failures"].append(str(error))
    return report


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        report = main(Path(sys.argv[1]))
    print(json.dumps(report))
