"""Jobs on a real Ray cluster of this machine, in one subprocess: results are those of ``generate``, whatever is killed.

Processes that import torch or Ray Data are the cost, not rows: a commit runs one job; at night others are killed.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import run_python
from histories import at_night, nightly

NUM_ROWS, FEW = 2000, 320
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray Data: pip install '.[ray]'")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    script = Path(__file__).with_name("run_ray.py")
    jobs = *at_night("alone", "two_actors", "two_ranks", "killed_driver"), "error_rows"
    return json.loads(run_python(script, tmp_path_factory.mktemp("ray"), *jobs, timeout=900).stdout)


def column(job, name):
    """The values by id; every row is there, and none twice."""
    values = {row["id"]: row[name] for row in job["rows"]}
    assert len(job["rows"]) == len(values) and sorted(values) == list(range(len(values)))
    return [values[i] for i in range(len(values))]


@needs_ray
@nightly
def test_two_actors_one_killed(report):
    """At most the batches in flight, 4 of 32 rows and as many that were done and not yet fetched, run again."""
    job, alone = report["two_actors"], report["alone"]
    assert column(job, "generated_tokens") == alone["token_ids"] and len(alone["token_ids"]) == NUM_ROWS
    assert column(job, "generated_text") == alone["text"] and len({*map(tuple, alone["token_ids"])}) > 1900
    assert job["engines"] == 3 and NUM_ROWS <= job["computed"] <= NUM_ROWS + 8 * 32


@needs_ray
@nightly
def test_killed_rank(report):
    """The actor whose rank dies leaves, and is started again."""
    job = report["two_ranks"]
    assert column(job, "generated_tokens") == report["alone"]["token_ids"][:FEW]
    assert job["engines"] == 2 and FEW <= job["computed"] <= FEW + 4 * 32


@needs_ray
@nightly
def test_killed_driver(report):
    """The second driver does not compute what the first had committed: two batches at least, for it had begun four."""
    job = report["killed_driver"]
    assert column(job, "generated_tokens") == report["alone"]["token_ids"][:FEW]
    assert job["engines"] == 2 and 0 < job["resumed"] <= FEW - 2 * 32


@needs_ray
def test_error_rows(report):
    """And what nobody kills computes each row once."""
    job = report["error_rows"]
    rows = {row["id"]: row for row in job["rows"]}
    assert len(job["rows"]) == len(rows) == job["computed"] == 11 and job["engines"] == 1
    errors = {i: row["__inference_error__"] for i, row in rows.items() if row["__inference_error__"]}
    assert errors == {
        1: "the prompt is empty; it must hold at least one token.",
        2: "SamplingParams: max_tokens=-1 must be an integer >= 0 or None.",
        6: "token id 1000000 is outside the vocabulary [0, 1024).",
        7: 'a row needs "messages", "prompt" or "tokenized_prompt".',
        8: "SamplingParams has no parameter 'temprature'. Did you mean 'temperature'?",
        9: "the model's chat template cannot take these messages: PreTrainedTokenizerBase.apply_chat_template() got "
        "multiple values for argument 'conversation'",
        10: "{'const': None} may hold a null, or fields that are absent: Arrow keeps both as null. Give the JSON "
        "schema as text.",
    }
    assert all("sampling_params" in rows[i] and rows[i]["generated_text"] is None for i in errors)
    assert all("sampling_params" not in rows[i] for i in rows.keys() - errors)  # postprocess dropped it
    assert rows[3]["generated_text"] == "5" and rows[3]["finish_reason"] == "stop"
    ((token_id, logprob), *_), *_ = rows[3]["logprobs"]
    assert token_id == rows[3]["generated_tokens"][0] and logprob["rank"] == 1 and rows[0]["logprobs"] is None
    assert rows[4]["generated_text"] == " a tiny demo"  # goes on with the assistant's message
    assert rows[5]["prompt_token_ids"] == [5, 6, 7] and rows[5]["num_generated_tokens"] == 3


@pytest.mark.skipif(bool(find_spec("ray")), reason="Ray is installed")
def test_without_ray():
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[ray\]' in the checkout"):
        import nanovllm.integrations.ray_data  # noqa: F401
