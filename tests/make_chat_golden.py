"""Make `tests/golden/chat/expected.json`: what transformers makes of `chat_cases.py`.

Needs transformers, which the tests do not:

    python tests/make_chat_golden.py

Template -> conversation -> the prompt's text, or what raising it gave.
"""

import json

import chat_cases
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), **chat_cases.SPECIAL_TOKENS
    )
    golden = {}
    for name, template in chat_cases.TEMPLATES.items():
        golden[name] = {}
        for title, (messages, options) in chat_cases.CONVERSATIONS.items():
            arguments = {"add_generation_prompt": True, **options}
            variables = arguments.pop("variables", {})
            special = {"additional_special_tokens": ["<a>", "<b>"]}
            try:
                result = tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=template,
                    tokenize=False,
                    **arguments,
                    **special,
                    **variables,
                )
            except (TemplateError, TypeError, ValueError) as error:
                result = {"error": str(error)}
            golden[name][title] = result
    file = chat_cases.FOLDER / "expected.json"
    file.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
