"""RequestOutput as a dictionary and as an object."""

import json
import re

import pytest

from nanovllm import CompletionOutput, RequestOutput


def output() -> RequestOutput:
    return RequestOutput("7", "2 + 4", [5, 6], [CompletionOutput(0, "6", [9, 1], finish_reason="stop")])


def test_as_a_dictionary():
    """As nano-vllm gives it, and its users write it to files."""
    out = output()
    assert (out["text"], out["token_ids"], out["finish_reason"]) == ("6", [9, 1], "stop")
    assert dict(out) == {**out} == {"text": "6", "token_ids": [9, 1], "finish_reason": "stop"}
    assert "text" in out and "logprobs" not in out and list(out) == ["text", "token_ids", "finish_reason"]
    assert out.get("text") == "6" and len(out) == 3
    assert isinstance(out, dict) and json.loads(json.dumps([out])) == [dict(out)]
    out["score"] = 0.5
    assert out["score"] == 0.5 and len(out) == 4
    for key in ("prompt", "index", 0):
        with pytest.raises(KeyError):
            out[key]


def test_as_an_object():
    out = output()
    assert (out.request_id, out.prompt, out.prompt_token_ids) == ("7", "2 + 4", [5, 6])
    assert (out.outputs[0].text, out.outputs[0].token_ids, out.outputs[0].stop_reason) == ("6", [9, 1], None)
    assert out.finished and out.num_cached_tokens == 0 and out.index == 0
    assert out.metrics is out.lora_request is out.prompt_logprobs is out.outputs[0].logprobs is None
    assert out.outputs[0].finished() and not CompletionOutput(0, "", []).finished()
    out.prompt = "edited"
    assert out.prompt == "edited"
    for name, hint in (("text", "; its first completion has: output.outputs[0].text."), ("txt", ".")):
        with pytest.raises(AttributeError, match=re.escape(f"a RequestOutput has no attribute {name!r}{hint}")):
            getattr(out, name)


def test_equality_is_identity():
    """Outputs of two requests were equal if their texts were, and could not be kept in a set."""
    one, other = output(), output()
    assert one == one and one != other and dict(one) == dict(other)
    assert len({one, other, one}) == 2
