"""Conversations as callers write them, checked: plain messages with texts.

Plain Python; knows roles and contents, nothing of templates.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


class ChatError(ValueError):
    """Messages cannot become a prompt; the text says why."""


def conversations(messages: Any) -> list[tuple[str, Any]]:
    """Return conversations, each with how errors begin that are about it."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        if any(isinstance(message, Mapping) for message in messages):
            return [("", messages)]
        return [(f"conversation {i}: ", one) for i, one in enumerate(messages)]
    raise ChatError(
        'messages must be a list of messages such as {"role": "user", "content": '
        f'"Hello"}}, or a list of such lists, got {messages!r}'
    )


def checked_messages(where: str, conversation: Any) -> list[dict[str, Any]]:
    """Return a conversation's messages as plain values, contents as texts."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes):
        raise ChatError(f"{where}must be a list of messages, got {conversation!r}")
    if not conversation:
        raise ChatError(f"{where}must have at least one message")
    messages = []
    for index, message in enumerate(conversation):
        name = f"{where}message {index}"
        if not isinstance(message, Mapping):
            raise ChatError(
                f"{name} must be a mapping with a role and a content, got {message!r}"
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{name}: role must be a text, not empty, got {role!r}")
        plain = plain_copy(name, dict(message))
        if plain.get("content") is not None or not plain.get("tool_calls"):
            plain["content"] = _content(name, plain.get("content"))
        messages.append(plain)
    return messages


def _content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(
            f"{name}: content must be a text, or a list of parts of type text, got "
            f"{content!r}"
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise ChatError(
                f'{name}: a part of a content must be {{"type": "text", "text": ...}} '
                f"(the models here read texts alone), got {part!r}"
            )
        texts.append(text)
    return "\n".join(texts)


def plain_copy(name: str, value: Any) -> Any:
    """Return a copy made of JSON's types: objects may have methods that do harm."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{name} must hold what JSON can: {error}") from error
