"""Messages to prompts: as transformers renders them, refused where they are wrong."""

import datetime
import json
import re

import numpy as np
import pytest
from tokenizers import processors

from punica_jax import ChatError, ChatTemplate, ModelFileError
from punica_jax.model_dir import ModelDir
from punica_jax.tokenizer import Tokenizer
from tests import chat_cases
from tests.tiny_checkpoint import byte_tokenizer

EXPECTED = json.loads((chat_cases.FOLDER / "expected.json").read_text())
USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def template(text, **special):
    return ChatTemplate({"default": text}, special)


def write(path, name, fields):
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(fields))
    return ModelDir(path)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("title", chat_cases.CONVERSATIONS)
@pytest.mark.parametrize("name", chat_cases.TEMPLATES)
def test_as_transformers_renders(name, title):
    messages, options = chat_cases.CONVERSATIONS[title]
    chat = template(chat_cases.TEMPLATES[name], **chat_cases.SPECIAL_TOKENS)
    expected = EXPECTED[name][title]
    if isinstance(expected, dict):
        with pytest.raises(ChatError, match=re.escape(expected["error"])):
            chat.render(messages, **options)
    else:
        assert chat.render(messages, **options) == [expected]


def test_many_conversations():
    chat = template(PLAIN)
    other = [USER, {"role": "assistant", "content": "yes"}]
    assert chat.render([[USER], other]) == ["user:hi;", "user:hi;assistant:yes;"]
    assert chat.render([]) == []
    with pytest.raises(ChatError, match=r"^conversation 1: message 0: role must be"):
        chat.render([[USER], [{"content": "x"}]])


def test_contents_in_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert template(PLAIN).render([message]) == ["user:a\nb;"]
    last = {"add_generation_prompt": False, "continue_final_message": True}
    assert template(PLAIN).render([message], **last) == ["user:a\nb"]


def test_a_text_alone_is_the_default():
    chat = ChatTemplate(PLAIN)
    assert chat.names == ["default"]
    assert chat.render([USER]) == ["user:hi;"]


def test_the_date():
    before = datetime.date.today()
    (text,) = template("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert before <= datetime.date.fromisoformat(text) <= datetime.date.today()


class TestFiles:
    def test_a_file_goes_before_the_field(self, tmp_path):
        write(tmp_path, "tokenizer_config.json", {"chat_template": "old"})
        (tmp_path / "chat_template.jinja").write_text("new{{ eos_token }}")
        write(tmp_path, "special_tokens_map.json", {"eos_token": "</s>"})
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool")
        for path in (str(tmp_path), tmp_path, ModelDir(tmp_path)):
            chat = ChatTemplate.from_dir(path)
            assert chat.names == ["default", "tool_use"]
            assert chat.render([USER]) == ["new</s>"]
        assert chat.render([USER], tools=[]) == ["tool"]
        assert chat.render([USER], template="tool_use") == ["tool"]

    def test_the_field(self, tmp_path):
        token = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
        fields = {
            "chat_template": "{{ bos_token }}{{ additional_special_tokens | join }}"
            "{{ pad_token is defined }}{{ add_bos_token is defined }}",
            "bos_token": token,
            "pad_token": None,
            "add_bos_token": True,
            "additional_special_tokens": [token, "<x>"],
        }
        files = write(tmp_path, "tokenizer_config.json", fields)
        assert ChatTemplate.from_dir(files).render([USER]) == ["<s><s><x>FalseFalse"]

    def test_named_templates(self, tmp_path):
        named = {"rag": "R", "tool_use": "T"}
        entries = [{"name": name, "template": text} for name, text in named.items()]
        files = write(tmp_path, "tokenizer_config.json", {"chat_template": entries})
        chat = ChatTemplate.from_dir(files)
        assert chat.render([USER], template="rag") == ["R"]
        assert chat.render([USER], tools=[]) == ["T"]
        with pytest.raises(
            ChatError,
            match="no default chat template; choose one by template=: 'rag', 'tool",
        ):
            chat.render([USER])
        with pytest.raises(ChatError, match=r"\('rag', 'tool_use'\), got 'rga'"):
            chat.render([USER], template="rga")
        assert chat.render([USER], template="{{ 1 + 1 }}") == ["2"]

    def test_none(self, tmp_path):
        chat = ChatTemplate.from_dir(tmp_path)
        assert chat.names == []
        with pytest.raises(ChatError) as caught:
            chat.render([USER])
        assert str(caught.value) == (
            f"{tmp_path} has no chat template (neither chat_template.jinja nor "
            "chat_template in tokenizer_config.json), as base models have none; pass "
            "one as template=, or call generate with texts"
        )
        assert chat.render([USER], template=PLAIN) == ["user:hi;"]

    @pytest.mark.parametrize("value", [3, [1], [{"name": "default"}], {"a": "b"}])
    def test_malformed(self, tmp_path, value):
        files = write(tmp_path, "tokenizer_config.json", {"chat_template": value})
        with pytest.raises(ChatError, match=r"config.json: chat_template must be a"):
            ChatTemplate.from_dir(files)

    def test_malformed_files(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(ModelFileError, match=r"template.jinja: not valid UTF-8"):
            ChatTemplate.from_dir(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / "tokenizer_config.json").write_text("[" * 10**6)
        with pytest.raises(ModelFileError, match=r"config.json: not valid JSON"):
            ChatTemplate.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", r'messages must be a list of messages such as {"role": .*got \'hi\''),
        (USER, r"messages must be a list of messages .* got {'role'"),
        (["hi"], "^conversation 0: must be a list of messages, got 'hi'"),
        ([[]], "^conversation 0: must have at least one message"),
        ([USER, "x"], "^message 1 must be a mapping with a role .* got 'x'"),
        ([{"content": "x"}], "^message 0: role must be a text, not empty, got None"),
        ([{"role": 3, "content": "x"}], "^message 0: role must be .* got 3"),
        ([{"role": "user"}], "^message 0: content must be a text, .* got None"),
        ([{"role": "user", "content": 5}], "^message 0: content must be .* got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}],
            "^message 0: a part of a content must be .* got {'type': 'image_url'",
        ),
        ([USER | {"name": np.zeros(2)}], "^message 0 must hold what JSON can"),
        ([USER | {"name": nested(10**5)}], "^message 0 must hold what JSON can"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(ChatError, match=message):
        template(PLAIN).render(messages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for %}", "the chat template is not valid Jinja, line 1: Expected"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "messages: no user$"),
        ("{{ 1 // 0 }}", "refused the messages: ZeroDivisionError"),
        ("{{ missing.name }}", "UndefinedError: 'missing' is undefined"),
        ("{{ " + "(" * 10**4 + "1", "template cannot be compiled: RecursionError"),
        (
            "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
            "template cannot be compiled: SyntaxError: too many statically nested",
        ),
    ],
)
def test_templates_that_fail(text, message):
    with pytest.raises(ChatError, match=message):
        template(text).render([USER])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": 3}, r"template must be a Jinja text, .* \('default'\), got 3"),
        ({"template": ["x"]}, r"template must be a Jinja text, .* got \['x'\]"),
        ({"variables": 3}, "variables must map names to values, got 3"),
        ({"variables": ["x"]}, r"variables must map names to values, got \['x'\]"),
    ],
)
def test_options_of_a_wrong_kind(options, message):
    with pytest.raises(ChatError, match=message):
        template(PLAIN).render([USER], **options)


@pytest.mark.parametrize("templates", [3, None, [PLAIN], {"default": 3}, {3: PLAIN}])
def test_templates_of_a_wrong_kind(templates):
    with pytest.raises(ChatError, match="templates must be a Jinja text, or map names"):
        ChatTemplate(templates)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
        "{{ range(10 ** 9) | list }}",
        "{{ self._TemplateReference__context.environment.globals.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_hostile_templates(text):
    message = dict(USER)
    with pytest.raises(ChatError, match="the chat template refused the messages"):
        template(text).render([message])
    assert message == USER


def test_continuing_needs_the_message():
    chat = template("{{ messages[0].role }}")
    last = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ChatError, match="does not write the last message's content as"):
        chat.render([USER], **last)
    with pytest.raises(ChatError, match="needs a last message with a text"):
        chat.render([{"role": "user", "content": ""}], **last)
    twice = template("{{ messages[0].content }}|{{ messages[0].content }}")
    with pytest.raises(ChatError, match="writes the last message's content more than"):
        twice.render([USER], **last)
    assert twice.render([USER]) == ["hi|hi"]
    with pytest.raises(ChatError, match="set add_generation_prompt=False"):
        chat.render([USER], continue_final_message=True)


@pytest.mark.parametrize("tokenizer_adds", [True, False])
@pytest.mark.parametrize("template_writes", [True, False])
def test_one_bos_at_most(tmp_path, tokenizer_adds, template_writes):
    raw = byte_tokenizer()
    if not tokenizer_adds:
        raw.post_processor = processors.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert (256 in tokenizer.encode("x")) == tokenizer_adds
    bos = "{{ bos_token }}" if template_writes else ""
    (text,) = template(bos + PLAIN, bos_token="<s>").render([USER])
    tokens = tokenizer.encode(text, add_special_tokens=False)
    # The template alone decides, as in transformers.
    assert tokens == [256] * template_writes + [
        raw.token_to_id(char) for char in "user:hi;"
    ]


def test_chat(llm, tmp_path):
    text = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = llm.encode_chat([[USER], [USER, USER]], template=text)
    assert [len(prompt) for prompt in prompts] == [3, 5]
    assert [prompt.count(256) for prompt in prompts] == [1, 1]
    greedy = type(llm.default_sampling)(max_new_tokens=3)
    both = llm.chat([[USER], [USER, USER]], ["a", None], greedy, template=text)
    assert both == llm.generate(["hi", "hihi"], ["a", None], greedy)
    pieces = []
    (one,) = llm.chat(
        [USER], "a", greedy, template=text, on_token=lambda i, t: pieces.append(t)
    )
    assert one == both[0] and "".join(pieces) == one.text
    with pytest.raises(ChatError, match="has no chat template"):
        llm.chat([USER])
    for other in (text, None):
        with pytest.raises(ValueError, match="chat_template must be a ChatTempl"):
            llm.chat_template = other
    assert isinstance(llm.chat_template, ChatTemplate)
