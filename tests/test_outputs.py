"""RequestOutput as a mapping and as an object."""

import pytest

from nanovllm import CompletionOutput, RequestOutput


def output() -> RequestOutput:
    return RequestOutput("7", "2 + 4", [5, 6], [CompletionOutput("6", [9, 1], "stop")])


def test_as_a_mapping():
    out = output()
    assert (out["text"], out["token_ids"], out["finish_reason"]) == ("6", [9, 1], "stop")
    assert dict(out) == {**out} == {"text": "6", "token_ids": [9, 1], "finish_reason": "stop"}
    assert "text" in out and "logprobs" not in out and list(out) == ["text", "token_ids", "finish_reason"]
    assert out.get("text") == "6" and len(out) == 3
    for key in ("prompt", "index", 0):
        with pytest.raises(KeyError):
            out[key]


def test_as_an_object():
    out = output()
    assert (out.request_id, out.prompt, out.prompt_token_ids) == ("7", "2 + 4", [5, 6])
    assert (out.outputs[0].text, out.outputs[0].token_ids, out.outputs[0].stop_reason) == ("6", [9, 1], None)
    assert out.finished and out.num_cached_tokens == 0
    with pytest.raises(AttributeError):
        out.prompt = ""


def test_equality_is_identity():
    """Outputs of two requests were equal if their texts were, and could not be kept in a set."""
    one, other = output(), output()
    assert one == one and one != other and one != dict(one)
    assert len({one, other, one}) == 2
