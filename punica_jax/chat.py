"""Chat templates: a conversation's messages, to the text that a model was trained on.

Plain Python; knows the checkpoint's own Jinja templates, nothing of tokens or models.
Templates come with checkpoints, so they run in Jinja's sandbox: no
private attributes, no mutation. A template that loops for long is not stopped.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from punica_jax.messages import ChatError, checked_messages, conversations, plain_copy
from punica_jax.model_dir import ModelDir

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
_FOLDER = "additional_chat_templates"
# Ends the message that is to be continued. The blank tells whether a template trims.
_END_MARK = "\N{OBJECT REPLACEMENT CHARACTER}end of the final message "


class ChatOptions(TypedDict, total=False):
    """The options of `ChatTemplate.render`, which says what they mean."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    template: str | None
    variables: Mapping[str, Any] | None


class ChatTemplate:
    """A checkpoint's chat templates and the special tokens that they write."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str | Sequence[str]] | None = None,
        *,
        name: str = "the model",
    ):
        """Take templates by name; compiled when first used.

        Args:
          templates: Jinja texts by name; "default" is the one for plain
            conversations, "tool_use" for those with tools. A text alone is "default".
          special_tokens: variables of every template: `bos_token` and so on.
          name: what errors call their owner.

        Raises:
          ChatError: `templates` is neither a text nor a mapping of texts.
        """
        if isinstance(templates, str):
            templates = {_DEFAULT: templates}
        if not isinstance(templates, Mapping) or not all(
            isinstance(text, str) for text in [*templates, *templates.values()]
        ):
            raise ChatError(
                "templates must be a Jinja text, or map names to Jinja texts, got "
                f"{templates!r}"
            )
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._name = name

    @property
    def names(self) -> list[str]:
        """Names of the templates; none where a checkpoint has no template."""
        return sorted(self._templates)

    @classmethod
    def from_dir(cls, path: str | Path | ModelDir) -> "ChatTemplate":
        """Read what transformers writes beside a tokenizer.

        That is `chat_template.jinja` with `additional_chat_templates/NAME.jinja`, else
        `chat_template` of `tokenizer_config.json`, a text or a list of named ones. A
        checkpoint may have none; the first `render` says so.

        Raises:
          ChatError: the field is neither.
          ModelFileError: a file is malformed.
        """
        files = path if isinstance(path, ModelDir) else ModelDir(path)
        templates = {}
        for file in sorted((files.path / _FOLDER).glob("*.jinja")):
            templates[file.stem] = files.text(f"{_FOLDER}/{file.name}") or ""
        default = files.text("chat_template.jinja")
        if default is not None:
            templates[_DEFAULT] = default
        if not templates:
            templates = _of_config(files)
        return cls(templates, _special_tokens(files), name=str(files.path))

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Turn conversations into prompts, special tokens spelled out.

        Args:
          messages: one conversation or a list of them. A conversation is a list of
            messages, each a mapping with a `role` and a `content`: a text, or a list
            of parts `{"type": "text", "text": ...}`, which are joined by newlines. A
            message with `tool_calls` needs no content. Other keys reach the template.
          add_generation_prompt: end where the assistant's next message begins.
          continue_final_message: end within the last message, to continue it.
          tools: JSON schemas of functions, for templates that know tools.
          documents: mappings with `title` and `text`, for templates that know them.
          template: a Jinja text, or the name of one of the checkpoint's templates.
          variables: more variables of the template (`enable_thinking` and the like).

        Returns:
          One prompt for each conversation.

        Raises:
          ChatError: a message is malformed, there is no template, or it fails.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatError(
                "continue_final_message continues the last message, "
                "add_generation_prompt begins another: set add_generation_prompt=False"
            )
        if variables is not None and not isinstance(variables, Mapping):
            raise ChatError(f"variables must map names to values, got {variables!r}")
        compiled = _compile(self._choose(template, tools is not None))
        shared = self._special_tokens | {
            "tools": plain_copy("tools", tools),
            "documents": plain_copy("documents", documents),
            "add_generation_prompt": add_generation_prompt,
            **plain_copy("variables", dict(variables or {})),
        }
        prompts = []
        for where, conversation in conversations(messages):
            render = _render_open if continue_final_message else _render
            prompts.append(
                render(compiled, where, checked_messages(where, conversation), shared)
            )
        return prompts

    def _choose(self, template: str | None, with_tools: bool) -> str:
        """Return the text of the template to use."""
        if template is not None:
            if not isinstance(template, str) or (
                template not in self._templates and "{" not in template
            ):
                known = ", ".join(map(repr, self.names)) or "none"
                raise ChatError(
                    f"template must be a Jinja text, or a name that {self._name} has "
                    f"({known}), got {template!r}"
                )
            return self._templates.get(template, template)
        for name in (_WITH_TOOLS, _DEFAULT) if with_tools else (_DEFAULT,):
            if name in self._templates:
                return self._templates[name]
        if self._templates:
            raise ChatError(
                f"{self._name} has no default chat template; choose one by template=: "
                f"{', '.join(map(repr, self.names))}"
            )
        raise ChatError(
            f"{self._name} has no chat template (neither chat_template.jinja nor "
            "chat_template in tokenizer_config.json), as base models have none; pass "
            "one as template=, or call generate with texts"
        )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own annotation)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=32)
def _compile(text: str) -> jinja2.Template:
    # As transformers renders templates, or they would come out with other blanks.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(
            f"the chat template is not valid Jinja, line {error.lineno}: {error}"
        ) from error
    # Deep nesting ends Jinja's parser, or Python's, in errors of several kinds.
    except Exception as error:
        raise ChatError(
            f"the chat template cannot be compiled: {type(error).__name__}: {error}"
        ) from error


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own would escape <, > and & for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _render(
    compiled: jinja2.Template,
    where: str,
    messages: list[dict[str, Any]],
    shared: Mapping[str, Any],
) -> str:
    try:
        return compiled.render(**{**shared, "messages": messages})
    # A template is a program, which may fail in any way.
    except Exception as error:
        own = type(error) is jinja2.TemplateError  # by raise_exception
        kind = "" if own else f"{type(error).__name__}: "
        raise ChatError(
            f"{where}the chat template refused the messages: {kind}{error}"
        ) from error


def _render_open(
    compiled: jinja2.Template,
    where: str,
    messages: list[dict[str, Any]],
    shared: Mapping[str, Any],
) -> str:
    """Render, and cut behind the last message's content."""
    if not messages[-1].get("content"):
        raise ChatError(
            f"{where}continue_final_message needs a last message with a text"
        )
    last = messages[-1] | {"content": messages[-1]["content"] + _END_MARK}
    text = _render(compiled, where, [*messages[:-1], last], shared)
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise ChatError(
            f"{where}continue_final_message: the chat template does not write the last "
            "message's content as it is"
        )
    if _END_MARK.rstrip() in text[:end]:
        raise ChatError(
            f"{where}continue_final_message: the chat template writes the last "
            "message's content more than once"
        )
    if text.startswith(_END_MARK, end):
        return text[:end]
    return text[:end].rstrip()  # as the template would have trimmed the message


def _of_config(files: ModelDir) -> dict[str, str]:
    """The templates of `tokenizer_config.json`."""
    value = files.fields("tokenizer_config.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
        if all(isinstance(text, str) for text in [*templates, *templates.values()]):
            return templates
    except (TypeError, KeyError):
        pass
    raise ChatError(
        f"{files.path / 'tokenizer_config.json'}: chat_template must be a text or a "
        f'list of {{"name": ..., "template": ...}}, got {value!r}'
    )


def _special_tokens(files: ModelDir) -> dict[str, str | list[str]]:
    """The variables `bos_token`, `eos_token` and the like."""
    found: dict[str, str | list[str]] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in files.fields(name).items():
            if key == "additional_special_tokens" and isinstance(value, list):
                texts = [_token_text(token) for token in value]
                found[key] = [text for text in texts if text is not None]
            elif key.endswith("_token") and (text := _token_text(value)) is not None:
                found[key] = text
    return found


def _token_text(token: Any) -> str | None:
    """A token's text; files hold it as such, or as an object with its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
