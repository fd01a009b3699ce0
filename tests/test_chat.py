"""Conversations, prompt dictionaries and the defaults of a request, on the demo model."""

import json
import logging
import re
import shutil

import pytest

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.engine.text import limits, tokenizer
from nanovllm.engine.text.chat_templates import takes_parts
from nanovllm.utils.checkpoint import DEMO_MODEL

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 32, "max_model_len": 128, "quiet": True}
NONE = SamplingParams(max_tokens=0)
HI = [{"role": "user", "content": "hi"}]
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | map(attribute='name') | join(' ') }}]{% endif %}"
    "{% if add_generation_prompt %}<a>{% if enable_thinking is defined and not enable_thinking %}<no/>{% endif %}"
    "{{ date | default('') }}{% endif %}"
)


@pytest.fixture(scope="module")
def demo():
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture
def with_files(tmp_path):
    """with_files(content, **options) -> an engine on a copy of the demo model."""
    made = []

    def make(content, **options):
        path = tmp_path / f"model{len(made)}"
        shutil.copytree(DEMO_MODEL, path)
        (path / "generation_config.json").write_text(json.dumps(content))
        made.append(LLM(str(path), **{**OPTIONS, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


def prompt_of(llm, messages, **options):
    (output,) = llm.chat(messages, NONE, use_tqdm=False, **options)
    return output.prompt


def refuses(text):
    return pytest.raises(RequestError, match="^" + re.escape(text))


# ---------------------------------------------------------------- template variables


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<user>hi<a>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>hi<a><no/>"),  # thinking stayed on
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<user>hi<a>"),
        ({"enable_thinking": False}, "<user>hi<a><no/>"),
        ({"enable_thinking": False, "date": "today"}, "<user>hi<a><no/>today"),
        ({"chat_template_kwargs": {"date": "today"}, "enable_thinking": False}, "<user>hi<a><no/>today"),
        ({"chat_template_kwargs": {"unknown": 1}}, "<user>hi<a>"),  # as with vLLM: scripts serve several models
        ({"chat_template_kwargs": None, "tools": None}, "<user>hi<a>"),
        ({"add_generation_prompt": False, "enable_thinking": False}, "<user>hi"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>hi"),
        ({"tools": [{"name": "add"}, {"name": "sub"}]}, "<user>hi[add sub]<a>"),
    ],
    ids=str,
)
def test_template_variables(demo, options, expected):
    assert prompt_of(demo, HI, chat_template=THINKING, **options) == expected


def test_variables_of_the_tokenizers_own_template(demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", THINKING)
    assert prompt_of(demo, HI, enable_thinking=False) == "<user>hi<a><no/>"
    monkeypatch.setattr(demo.tokenizer, "chat_template", {"default": THINKING})
    assert prompt_of(demo, HI, enable_thinking=False) == "<user>hi<a><no/>"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("enable_thinkin", " Did you mean 'enable_thinking'?"),
        ("chat_template_kwarg", " Did you mean 'chat_template_kwargs'?"),
        ("temperature", " It is a parameter of a request: SamplingParams(temperature=...)."),
        ("lora_requests", ""),
        ("priority", ""),
    ],
)
def test_unknown_arguments(demo, name, hint):
    """Any was taken for a variable of the template, and so ignored."""
    text = f"chat() has no argument {name!r}, and the chat template reads no such variable.{hint}"
    with pytest.raises(RequestError, match="^" + re.escape(text) + "$"):
        demo.chat(HI, use_tqdm=False, chat_template=THINKING, **{name: 1})
    with refuses(text[: text.index(".")]):
        demo.chat(HI, use_tqdm=False, **{name: 1})
    assert demo.is_finished()


def test_template_variables_that_are_no_dictionary(demo):
    with refuses("chat_template_kwargs must be a dict or None, not 'no_think'."):
        demo.chat(HI, use_tqdm=False, chat_template_kwargs="no_think")


def test_a_template_that_explodes(demo, monkeypatch):
    """Nested loops ran for hours; a text of gigabytes was tokenized."""
    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.3)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with refuses("the model's chat template takes more than 0.3 s for these messages: one of its loops"):
        demo.chat(HI, use_tqdm=False, chat_template=loops)
    assert prompt_of(demo, HI, chat_template=THINKING) == "<user>hi<a>"
    for module, limit in ((tokenizer, "MAX_CHARACTERS"), (limits, "MAX_CHARACTERS"), (tokenizer, "LONG")):
        monkeypatch.setattr(module, limit, 1000)
    with refuses("the text has 5,000 characters; allowed are 1,000."):
        demo.chat(HI, use_tqdm=False, chat_template="{{ 'x' * 5000 }}")
    with refuses("prompt 1: the text has 1,001 characters; allowed are 1,000."):
        demo.generate(["x", "x" * 1001], use_tqdm=False)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}], "hi\nyou"),
        ([{"text": "hi"}, "you"], "hi\nyou"),
        ([], ""),
        (None, ""),
        ("", ""),
    ],
)
def test_contents(demo, content, text):
    """OpenAI's lists of parts, and None, were an error of string templates."""
    message = {"role": "user", "content": content}
    assert prompt_of(demo, [message]) == prompt_of(demo, [{"role": "user", "content": text}])
    assert message == {"role": "user", "content": content}, "the caller's message was changed"


NO_TOWER = " Note that this engine takes no images: this model has no vision tower."


@pytest.mark.parametrize(
    ("part", "named"),
    [({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'." + NO_TOWER),
     ({"type": "image"}, "'image'." + NO_TOWER), ({"image_url": "x"}, "'image_url'." + NO_TOWER),
     ({"type": "text", "text": None}, "'text'."), (5, "'int'."),
     ({"type": "video", "video": "x"}, "'video'."), ({"type": ["text"], "text": "hi"}, "\"['text']\"."),
     ({"type": "text", "text": "hi", "image_url": "x"}, "'text' with 'text' and 'image_url'.")],
)  # fmt: skip
def test_parts_that_are_no_text(demo, part, named):
    """An image was refused without its reason; one beside a text was left out without a word."""
    with refuses(f'a part of a message must be {{"type": "text", "text": "..."}}, not {named}'):
        demo.chat([{"role": "user", "content": [part]}], use_tqdm=False)


LISTS = (  # takes lists alone
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "[hi]"), ([{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}], "[hi][you]"),
        ([{"text": "hi"}, "you"], "[hi][you]"), ([{"type": "input_text", "text": "hi"}], "[hi]"),
        ([{"type": None, "text": "hi", "image": None}, {"type": "text", "text": "", "index": 0}], "[hi][]"),
        ([{"type": "text", "text": "hi", "image_url": None, "cache_control": {"type": "x"}}], "[hi]"),
        ("", ""), (None, ""), ([], ""),
    ],
)  # fmt: skip
def test_a_template_that_takes_lists(demo, monkeypatch, role, content, text):
    """It got strings, and wrote nothing: a template that loops over parts gets them, in every role."""
    messages = [{"role": role, "content": content}]
    assert prompt_of(demo, messages, chat_template=LISTS) == f"<{role}>{text}"
    for own in (LISTS, {"default": LISTS}, {"default": "{{ 1 }}", "lists": LISTS}):
        monkeypatch.setattr(demo.tokenizer, "chat_template", own)
        named = {"chat_template": "lists"} if "lists" in own else {}
        assert prompt_of(demo, messages, **named) == f"<{role}>{text}"


def test_the_template_of_chats_with_tools(demo, monkeypatch):
    """Several templates have names; the one that is rendered decides about the form of contents."""
    own = {"default": "{{ messages[0].content }}", "tool_use": "{% if tools %}" + LISTS + "{% endif %}"}
    monkeypatch.setattr(demo.tokenizer, "chat_template", own)
    assert prompt_of(demo, HI) == "hi" and prompt_of(demo, HI, tools=[{"name": "add"}]) == "<user>[hi]"


def test_the_form_of_contents_that_is_asked_for(demo):
    """``chat_template_content_format`` overrules the template."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]}]
    plain = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    both = plain + "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
    listed = '[{"type": "text", "text": "hi"}]'
    for template, form, text in ((plain, "auto", '"hi"'), (plain, "openai", listed), (both, "auto", listed),
                                 (both, "string", '"hi"'), (both, "openai", listed)):  # fmt: skip
        assert prompt_of(demo, HI, chat_template=template, chat_template_content_format=form) == text
        assert demo.apply_chat_template(HI, chat_template=template, chat_template_content_format=form) == text
    assert prompt_of(demo, parts, chat_template=both, chat_template_content_format="string") == '"hi\\nyou"'
    with refuses("chat_template_content_format='parts' must be 'auto' or 'string' or 'openai'."):
        demo.chat(HI, use_tqdm=False, chat_template_content_format="parts")


def test_an_answer_that_is_begun_in_parts(demo):
    given = [*HI, {"role": "assistant", "content": "The"}]
    assert prompt_of(demo, given, chat_template=LISTS + "!", continue_final_message=True) == "<user>[hi]<assistant>[The"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% for m in messages %}{% for p in m['content'] %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.get('content', []) %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}", True),
        ("{% set all = messages[1:] %}{% for m in all %}{% for p in m.content[:1] %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text') | list %}"
         "{% generation %}{{ p.text }}{% endgeneration %}{% endfor %}{% endfor %}", True),
        ("{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}{{ p.text }}"
         "{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) | trim }}{% endfor %}", True),
        ("{% macro a(x) %}{% for p in x %}{% endfor %}{% endmacro %}{% macro b(m, n) %}{{ a(n) }}{{ a(x=m.content) }}"
         "{% endmacro %}{{ b(messages[0], 1) }}", True),
        ("{% for i in range(3) %}{% set m = messages[i] %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
        ("{% set ns = namespace(last=messages[-1]) %}{% for p in ns.last.content or [] %}{% endfor %}", True),
        ("{% set ns = namespace(c='') %}{% for m in messages %}{% set ns.c = m.content %}{% for p in ns.c %}"
         "{% endfor %}{% break %}{% endfor %}", True),
        ("{% for m in messages %}{% if m.x %}{% set c = m.content %}{% else %}{% set c = [] %}"
         "{% endif %}{% for p in c %}{% endfor %}{% endfor %}", True),
        ("{% with c = (messages | first).content if messages else [] %}{% for p in c %}{% endfor %}"
         "{% endwith %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t.content }}{% endfor %}"
         "{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for line in m.content.split('x') %}{{ line }}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{% set c = m.content %}{% set c = c.split('x') %}{% for t in c %}{% endfor %}"
         "{% endfor %}", False),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.tool_calls) }}{{ m.content }}{% endfor %}", False),
        ("{% for content in documents %}{% for x in content %}{% endfor %}{% endfor %}"
         "{{ messages[0].content }}", False),
        ("{% set content = messages[0].content %}{% for content in tools %}{% for x in content %}{% endfor %}"
         "{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}", False),  # no template
        ("", False),
    ],
    ids=lambda x: "",
)  # fmt: skip
def test_templates_that_take_parts(template, takes):
    assert takes_parts(template) == takes


def test_a_template_that_is_hard_to_read():
    """Calls of calls, and macros that call each other with every argument, are read in a moment."""
    deep = "{{ " + "x.get(" * 90 + "1" + ")" * 90 + " }}"
    macros = "{{ m0(messages, 1) }}"
    for i in range(60):
        macros = f"{{% macro m{i}(a, b) %}}{{{{ m{i + 1}(a, b) }}}}{{{{ m{i + 1}(b, a) }}}}{{% endmacro %}}" + macros
    assert not any(map(takes_parts, (deep, macros, "{% if x %}" * 5000, "{{" + "(" * 9000)))


def test_fields_of_a_message_reach_the_template(demo):
    call = [{"name": "add", "arguments": {"a": 1}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": call}, {"role": "tool", "content": "3"}]
    template = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}:{{ c.name }}{% endfor %};{% endfor %}"
    assert prompt_of(demo, messages, chat_template=template) == "assistant:add;tool;"


def test_several_conversations(demo):
    questions = ["What is 2 + 3?", "What is 4 + 4?", "What is 2 + 3?"]
    params = SamplingParams(temperature=0, max_tokens=8)
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = demo.chat(conversations, params, use_tqdm=False)
    assert [output["text"] for output in outputs] == ["5", "8", "5"]
    (single,) = demo.chat(conversations[1], params, use_tqdm=False)
    assert single["text"] == "8" and single.prompt == outputs[1].prompt
    sampled = SamplingParams(seed=1, n=2, max_tokens=8)
    assert [len(output.outputs) for output in demo.chat(conversations, sampled, use_tqdm=False)] == [2] * 3


# ---------------------------------------------------------------- prompt dictionaries


@pytest.mark.parametrize(
    ("given", "text", "ids"),
    [
        ({"prompt": "The"}, "The", None),
        ({"prompt_token_ids": [5, 6, 7]}, None, [5, 6, 7]),
        ({"prompt_token_ids": [5, 6, 7], "prompt": "not these"}, "not these", [5, 6, 7]),
        ({"prompt": "The", "prompt_token_ids": None}, "The", None),
        ({"prompt": None, "prompt_token_ids": (5, 6)}, None, [5, 6]),
        ({"prompt": "The", "multi_modal_data": None}, "The", None),
    ],
    ids=str,
)
def test_prompt_dictionaries(demo, given, text, ids):
    """The ids count; the text beside them is carried."""
    params = SamplingParams(temperature=0, max_tokens=3)
    ids = demo.tokenizer.encode("The") if ids is None else ids
    (plain,) = demo.generate([ids], params, use_tqdm=False)
    for outputs in (demo.generate(given, params, use_tqdm=False), demo.generate([given], params, use_tqdm=False)):
        (output,) = outputs
        assert (output.prompt, output.prompt_token_ids) == (text, ids)
        assert output["token_ids"] == plain["token_ids"]
    assert demo.add_request(given, params) > int(output.request_id)
    while not demo.is_finished():
        demo.step()


def test_token_ids_of_a_range(demo):
    """``stream`` took each for a prompt, and ``generate`` took an iterator of integers for one prompt."""
    (expected,) = demo.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    params, ids = SamplingParams(temperature=0, max_tokens=3), expected["token_ids"]
    assert demo.generate(range(5, 8), params, use_tqdm=False)[0]["token_ids"] == ids
    assert [token for delta in demo.stream(range(5, 8), params) for token in delta["token_ids"]] == ids
    assert demo.submit(range(5, 8), params).result()["token_ids"] == ids
    for use in (lambda: demo.generate(iter([5, 6]), use_tqdm=False), lambda: list(demo.stream(iter([5, 6])))):
        with refuses("prompt 0: a prompt must be a string or a flat list of integer token ids, not 5."):
            use()


@pytest.mark.parametrize("given", [
    {"multi_modal_data": {"video": [], "image": None}}, {"mm_processor_kwargs": {"fps": 1, "use_fast": None}},
])  # fmt: skip
def test_keys_of_prompts_that_change_nothing(demo, given):
    expected = demo.generate("The", NONE, use_tqdm=False)[0].prompt_token_ids
    assert demo.generate({"prompt": "The", **given}, NONE, use_tqdm=False)[0].prompt_token_ids == expected


def test_refused_prompt_dictionaries(demo):
    """By every call; other texts: ``test_refusals.py``."""
    for use in (demo.generate, demo.add_request, lambda prompt: next(demo.stream(prompt))):
        for given, text in (({}, 'a prompt dictionary needs "prompt", a string, or "prompt_token_ids", a list of '),
                            ({"prompt": "The", "other": 1}, "a prompt dictionary cannot have 'other': text only."),
                            ({"prompt": "The", "multi_modal_data": {"image": 1}}, NO_TOWER[len(" Note that ") :])):
            with refuses(text):
                use(given)
    assert demo.is_finished()


# ---------------------------------------------------------------- defaults


def test_defaults_of_generation_config(with_files):
    """They were not read: Qwen3 was sampled at temperature 1.0 and without its top-k."""
    llm = with_files({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 2})
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    params.temperature = 2.0  # its owner's
    assert llm.get_default_sampling_params().temperature == 0.6


def test_who_takes_the_defaults(with_files):
    """Every way to ask, as long as it gives no parameters; explicit ones are taken whole."""
    llm = with_files({"top_k": 1, "temperature": 5.0, "eos_token_id": 2})
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    assert llm.chat(question, use_tqdm=False)[0]["text"] == "5"
    prompt = llm.chat(question, NONE, use_tqdm=False)[0].prompt
    assert llm.generate(prompt, use_tqdm=False)[0]["text"] == "5"
    assert "".join(delta["text"] for delta in llm.stream(prompt)) == "5"
    assert [output["text"] for output in llm.stream([prompt])] == ["5"]
    request, finished = llm.add_request(prompt), []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished == [(request, llm.generate(prompt, use_tqdm=False)[0]["token_ids"])]
    hot = SamplingParams(temperature=5.0, seed=0, max_tokens=12)
    assert llm.generate(prompt, hot, use_tqdm=False)[0]["text"] != "5"


def test_without_the_models_defaults(with_files):
    config = {"temperature": 0.6, "top_k": 20}
    assert with_files(config, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    assert with_files({}).get_default_sampling_params() == SamplingParams()


# ---------------------------------------------------------------- lengths


def test_max_tokens_none_is_what_fits(demo):
    """Into max_model_len, and into the pool."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    short, long = demo.generate([[5] * 9, [5] * 122], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in (short, long)] == [119, 6]
    assert short["finish_reason"] == long["finish_reason"] == "length"
    with LLM(**{**OPTIONS, "num_kvcache_blocks": 4}) as llm:
        assert len(llm.generate([5] * 9, params, use_tqdm=False)[0]["token_ids"]) == 4 * 16 + 1 - 9
    assert params.max_tokens is None


@pytest.mark.parametrize(
    ("keep", "length", "left"),
    [(5, 30, 5), (30, 30, 30), (99, 30, 30), (1, 30, 1), (-1, 30, 30), (-1, 128, 127), (-1, 999, 127), (100, 999, 100)],
)
def test_truncate_prompt_tokens(demo, keep, length, left):
    """The last tokens stay; a prompt that is too long becomes one that fits."""
    prompt = [5 + i % 90 for i in range(length)]
    params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=keep)
    (output,) = demo.generate([prompt], params, use_tqdm=False)
    assert output.prompt_token_ids == prompt[-left:]
    (same,) = demo.generate([prompt[-left:]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert output["token_ids"] == same["token_ids"]
    params.max_tokens, params.prompt_logprobs = 0, 0  # there is room for one more
    (scored,) = demo.generate([prompt], params, use_tqdm=False)
    assert len(scored.prompt_token_ids) == (min(length, 128) if keep == -1 else left)


def test_max_tokens_that_is_cut_is_told_once(caplog):
    """Qwen3's documented max_tokens=32768 ended at 4,096 tokens without a word."""
    text = "max_tokens=300 is cut to 123 by max_model_len=128 (the prompt has 5 tokens). This is said once."
    with LLM(**OPTIONS) as llm, caplog.at_level(logging.WARNING, "nanovllm"):
        soon = {"stop_token_ids": list(range(1024))}
        for max_tokens in (123, None):
            llm.generate([[5] * 5] * 2, SamplingParams(max_tokens=max_tokens, **soon), use_tqdm=False)
        assert caplog.messages == []
        for _ in range(2):
            llm.generate([[5] * 5, [5] * 6], SamplingParams(max_tokens=300, **soon), use_tqdm=False)
        assert caplog.messages == [text]
        assert {(record.name, record.levelname) for record in caplog.records} == {("nanovllm", "WARNING")}


# ---------------------------------------------------------------- the tokenizer


def test_one_text_is_one_text(demo):
    """``tokenize("The")`` gave the ids of three letters; ``chat_prompts`` of one conversation an AttributeError."""
    assert demo.tokenize("2 + 3") == demo.tokenize(["2 + 3"]) and demo.detokenize(demo.tokenize("2 + 3")) == ["2 + 3"]
    talk = [{"role": "user", "content": "hello"}]
    assert demo.chat_prompts(talk) == demo.chat_prompts([talk])


def test_get_and_set_tokenizer(demo):
    """The live one: what its owner changes counts from then on."""
    tokenizer = demo.get_tokenizer()
    assert tokenizer is demo.tokenizer and tokenizer.decode(tokenizer.encode("The")) == "The"
    other = LLM(**OPTIONS)
    try:
        copied = other.get_tokenizer()
        copied.chat_template = "{{ messages[0].content }}!"
        assert prompt_of(demo, HI) != "hi!" == prompt_of(other, HI)
        demo.set_tokenizer(copied)
        assert demo.get_tokenizer() is demo.tokenizer is copied
        assert prompt_of(demo, HI) == "hi!"
        stopped = demo.generate("What is 2 + 3?", SamplingParams(temperature=0, stop="5"), use_tqdm=False)
        assert stopped[0]["text"] == "\n"
    finally:
        demo.set_tokenizer(tokenizer)
        other.exit()


def test_set_tokenizer_where_there_was_none():
    with LLM(**{**OPTIONS, "skip_tokenizer_init": True}) as bare, LLM(**OPTIONS) as llm:
        assert bare.get_tokenizer() is None
        with refuses("text needs a tokenizer"):
            bare.generate("The", use_tqdm=False)
        bare.set_tokenizer(llm.get_tokenizer())
        params = SamplingParams(temperature=0, max_tokens=8)
        (given,), (expected,) = (x.generate("The", params, use_tqdm=False) for x in (bare, llm))
        assert (given["text"], given["token_ids"]) == (expected["text"], expected["token_ids"]) and given["text"]
