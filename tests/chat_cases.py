"""Conversations, and chat templates as checkpoints of several families have them.

Shared by the tests and by `make_chat_golden.py`, which runs without JAX. The template
`blocks` has what few use: blocks for training, loop controls, lines of statements.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "golden" / "chat"
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather: is 2 < 3 & 'ü'?",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief.  "}
USER = {"role": "user", "content": "  Hello <b>there</b>, naïve café? "}
REPLY = {"role": "assistant", "content": " Yes, \n and "}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich"}},
        }
    ],
}
ANSWER = {"role": "tool", "content": "sunny"}

# Name -> messages and options of `render`.
CONVERSATIONS = {
    "user": ([USER], {}),
    "no prompt": ([USER, REPLY], {"add_generation_prompt": False}),
    "system": ([SYSTEM, USER, REPLY, USER], {}),
    "two users": ([USER, USER], {}),
    "continue": (
        [USER, REPLY],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "tools": ([SYSTEM, USER, CALL, ANSWER], {"tools": TOOLS}),
    "odd roles": (
        [USER, {"role": "comment", "content": "-"}, {"role": "end", "content": ""}],
        {
            "documents": [{"title": "T", "text": "<&>"}],
            "variables": {"greeting": "hi", "date_string": "1 May"},
        },
    ),
}
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "mask_token": "<mask>",
    "additional_special_tokens": ["<a>", "<b>"],
}
