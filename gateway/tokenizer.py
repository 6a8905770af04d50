"""Text to token ids and back, and the chat template. Loads nothing but the tokenizer: no model, no torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedTokenizerFast

from carrel.process.gguf_file import GGUFError
from gateway.errors import ConfigError, InvalidRequest
from gateway.exchange import Message, Scalar, ToolCall
from gateway.gguf_tokenizer import read_gguf_tokenizer
from gateway.token_texts import TokenTexts
from gateway.tool_calls.written import read_arguments

TOKENIZER_FILES = ["tokenizer*", "*.jinja", "special_tokens_map.json", "generation_config.json"]

# OpenAI's newer word for the system
DEVELOPER = "developer"
NO_TEMPLATE = (
    "This model has no chat template. Use /v1/completions, or start the server with --chat-template FILE."
)


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads: nothing is changed after construction."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # a file may ask for either; both would change what the client wrote
        self._backend.no_truncation()
        self._backend.no_padding()
        self.tokens = TokenTexts(self._backend)
        self.chat_template = chat_template
        self._roles = {} if DEVELOPER in (chat_template or "") else {DEVELOPER: "system"}
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}

    @cached_property
    def max_chars_per_token(self) -> int:
        """Length of the longest vocabulary entry: a text of n characters has at least n over this many tokens."""
        return max((len(token) for token in self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def answer_lead(self) -> str:
        """White space that the template writes between its generation prompt and an assistant's message.

        Empty where it writes something else there, refuses such a chat, or is missing.
        """
        asked, answered = Message("user", "question"), Message("assistant", "answer")
        try:
            prompt = self._render([asked], {}, add_generation_prompt=True)
            chat = self._render([asked, answered], {}, add_generation_prompt=False)
        except (jinja2.TemplateError, TypeError, ValueError):
            return ""
        lead, found, _ = chat.removeprefix(prompt).partition(answered.content)
        return lead if chat.startswith(prompt) and found and lead.isspace() else ""

    @cached_property
    def takes_one_call(self) -> bool:
        """True if the template writes a message of one call, but refuses a message of several or leaves some out."""
        return self._writes_calls(1) and not self._writes_calls(2)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; `add_special_tokens` puts the model's begin token first where it has one."""
        # only batches are encoded and decoded outside Python's lock: other threads, the event loop's, go on
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens. Unknown ids are skipped."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """As `decode`; of so many that it belongs in a thread, where this holds up no other."""
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=True)
        return str(text)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """As `decode`, with special tokens by their names."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's name in the vocabulary, in which another character mostly stands for a leading space."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None where there is none of that name."""
        added = self._backend.get_added_tokens_decoder()
        return next(
            (token_id for token_id, token in added.items() if token.special and token.content == name), None
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Scalar],
        adds_generation_prompt: bool = True,
        continues_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text for a chat, by the model's template in transformers' sandbox. A developer is the system to a
        template that does not know the role. tools: as OpenAI writes them.

        Raises InvalidRequest when there is no template or when the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest(NO_TEMPLATE, "messages", "no_chat_template")
        for name in arguments:
            if name in self._reserved or not name.isidentifier():
                raise InvalidRequest(
                    f"{name[:50]!r} cannot be set for the chat template.", "chat_template_kwargs"
                )
        try:
            return self._render(
                messages,
                arguments,
                add_generation_prompt=adds_generation_prompt,
                continue_final_message=continues_final,
                tools=tools,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as exc:
            reason = " ".join(str(exc).split())[:200]
            raise InvalidRequest(f"The chat template refused the messages: {reason}", "messages") from exc

    def _writes_calls(self, num_calls: int) -> bool:
        # Mistral's templates take ids of nine letters or digits only
        calls = tuple(
            ToolCall(f"probe000{at}", "probe", json.dumps({"probe": f"probe-{at}"}))
            for at in range(num_calls)
        )
        answers = (Message("tool", "answer", tool_call_id=call.id, name=call.name) for call in calls)
        messages = [Message("user", "question"), Message("assistant", "", calls), *answers]
        try:
            text = self._render(messages, {}, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError):
            return False
        return all(f"probe-{at}" in text for at in range(num_calls))

    def _render(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Scalar],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        # Any: free template variables share the keyword arguments with transformers' typed ones
        render: Any = self._tokenizer.apply_chat_template
        text = render(
            [_message_json(each, self._roles.get(each.role, each.role)) for each in messages],
            chat_template=self.chat_template,
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **arguments,
        )
        return str(text)


def _message_json(message: Message, role: str) -> dict[str, Any]:
    """As templates take it: a call's arguments are an object."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
        }
        for call in message.tool_calls
    ]
    optional = {
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }
    present = {name: value for name, value in optional.items() if value}
    return {"role": role, "content": message.content, **present}


def resolve_model_dir(flag: str, model: str, revision: str | None) -> Path:
    """A local model's directory or GGUF file, or the tokenizer's files of a hub id. Raises ConfigError, which names
    `flag`."""
    path = Path(model)
    if path.exists():
        return path
    if path.is_absolute() or model.startswith("."):
        raise ConfigError(f"{flag} {model}: no such directory or file")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=TOKENIZER_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            f"{flag} {model}: no such directory or file, and not on the hub ({reason})"
        ) from exc


def load_tokenizer(model: Path, chat_template_file: Path | None) -> Tokenizer:
    """Tokenizer and chat template of a model's directory (its `tokenizer.json`) or GGUF file.

    Raises ConfigError when either cannot be used.
    """
    try:
        tokenizer = read_gguf_tokenizer(model) if model.is_file() else _read_directory(model)
    except (ConfigError, GGUFError) as exc:
        raise ConfigError(str(exc)) from exc
    except Exception as exc:
        # the tokenizers library raises plain Exception for what it cannot read
        raise ConfigError(f"the tokenizer in {model} cannot be loaded: {exc}") from exc
    if chat_template_file is None:
        return Tokenizer(tokenizer, _own_template(tokenizer))
    try:
        template = chat_template_file.read_text(encoding="utf-8")
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as exc:
        raise ConfigError(f"--chat-template {chat_template_file}: {exc}") from exc
    return Tokenizer(tokenizer, template)


def _read_directory(model_dir: Path) -> PreTrainedTokenizerFast:
    if not (model_dir / "tokenizer.json").is_file():
        raise ConfigError(
            f"{model_dir} has no tokenizer.json: give a directory that holds one with --tokenizer"
        )
    # not AutoTokenizer, whose import loads torch where it is installed
    return PreTrainedTokenizerFast.from_pretrained(str(model_dir))


def _own_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template
