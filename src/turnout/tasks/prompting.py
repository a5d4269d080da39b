"""Prompts and messages to token ids, by the package's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from turnout.config import READ
from turnout.errors import InputError
from turnout.package.facts import Artifact
from turnout.package.formats.template import Refusal, TemplateError, render
from turnout.tasks.tokenization import load_tokenizer
from turnout.types import Request, Task


class Prompter:
    """Token ids of a request and text of generated ids, for backends that have no tokenizer of their own.

    ``limit`` is the context in tokens, 0 when the package does not tell.
    """

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.tokenizer = load_tokenizer(root, artifact, options)
        self.template = _template(artifact, options)
        self.tokens = _special_tokens(artifact)
        self.eos_ids = _eos_ids(artifact, self.tokenizer)
        dims = artifact.architecture.dims if artifact.architecture else {}
        self.limit = _limit(options.get("context"), int(dims.get("max_position_embeddings") or 0))

    def ids(self, request: Request) -> list[int]:
        """Token ids. Raises ``InputError`` for messages that the template refuses, an empty prompt, and
        a prompt that leaves no room in the context (both numbers named)."""
        if request.task == Task.CHAT:
            try:
                text = render(self.template, list(request.inputs["messages"]), **self.tokens)
            except (Refusal, TemplateError) as error:
                raise InputError(f"the chat template: {error}", code="template.invalid") from None
            ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        else:
            ids = list(self.tokenizer.encode(str(request.inputs["prompt"])).ids)
        if not ids:
            raise InputError("the prompt gives no tokens")
        if self.limit and len(ids) >= self.limit:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the context {self.limit}", hints=["shorten the prompt"]
            )
        return ids

    def room(self, prompt_tokens: int, wanted: int) -> int:
        """Tokens that may be generated after a prompt: ``wanted``, cut to what the context leaves."""
        return min(wanted, self.limit - prompt_tokens) if self.limit else wanted

    def text(self, ids: list[int]) -> str:
        """Text of ids without special tokens."""
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return decoded


class Encodes(Protocol):
    """The part of a vocabulary that prompts need."""

    bos_id: int | None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text; ``special`` adds what the tokenizer adds around a prompt."""
        ...


class PromptEncoder:
    """Token ids of a request by any vocabulary: messages through the chat template, text as it is."""

    def __init__(self, artifact: Artifact, options: dict[str, Any], vocabulary: Encodes) -> None:
        self.template = _template(artifact, options)
        self.tokens = _special_tokens(artifact)
        self.vocabulary = vocabulary
        config = artifact.architecture.config if artifact.architecture else {}
        start = artifact.generation.decoder_start_id if artifact.generation else None
        self._start = start if start is not None else config.get("decoder_start_token_id")

    def ids(self, request: Request) -> tuple[list[int], list[int] | None]:
        """Prompt of the decoder, and of the encoder where the task has one. Raises ``InputError``."""
        if request.task == Task.CHAT:
            return self.chat(list(request.inputs["messages"])), None
        if request.task == Task.TEXT_GENERATION:
            return self.text(str(request.inputs["prompt"])), None
        source = self.text(str(request.inputs["text"]))
        if self._start is None:
            raise InputError("the package names no first token of the decoder", code="config.unsupported_value")
        return [int(self._start)], source

    def text(self, text: str) -> list[int]:
        """Ids of a text; the start token alone for an empty one. Raises ``InputError`` where there is none."""
        ids = self.vocabulary.encode(text)
        if not ids and self.vocabulary.bos_id is not None:
            ids = [self.vocabulary.bos_id]
        if not ids:
            raise InputError("the prompt gives no tokens", hints=["this model has no start token: give some text"])
        return ids

    def chat(self, messages: list[Any], **variables: Any) -> list[int]:
        """Ids of messages; ``variables`` reach the template. Raises ``InputError`` when it refuses them."""
        if not self.template:
            raise InputError("the package has no chat template", code="template.missing")
        try:
            text = render(self.template, messages, **{**self.tokens, **variables})
        except (Refusal, TemplateError) as error:
            raise InputError(f"the chat template: {error}", code="template.invalid") from None
        return self.vocabulary.encode(text, special=False)


def _limit(asked: Any, stated: int) -> int:
    """Context in tokens: the package's, or less where the option ``context`` says so; 0 when nobody does."""
    try:
        wanted = int(asked) if asked is not None else 0
    except (TypeError, ValueError):
        wanted = -1
    if wanted < 0 or (wanted == 0 and asked is not None):
        raise InputError(f"`context={asked}` is no number of tokens", code="option.unsupported")
    return min(wanted, stated) if wanted and stated else wanted or stated


def _template(artifact: Artifact, options: dict[str, Any]) -> str:
    named = options.get("chat_template")
    if named:
        path = Path(str(named))
        if not path.is_file() or path.stat().st_size > READ.template_bytes:
            raise InputError(f"no usable chat template at `{named}`", code="template.missing")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the chat template `{named}` is no text: {error}", code="template.invalid") from None
    templates = sorted((t for t in artifact.templates if t.valid), key=lambda t: t.name != "default")
    return templates[0].text if templates else ""


def _special_tokens(artifact: Artifact) -> dict[str, Any]:
    tokenizer = artifact.tokenizer
    if tokenizer is None:
        return {}
    named = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
    return {name: token for name, token in named.items() if token is not None}


def _eos_ids(artifact: Artifact, tokenizer: Any) -> frozenset[int]:
    ids = list(artifact.generation.eos_ids) if artifact.generation else []
    if not ids and artifact.tokenizer is not None and artifact.tokenizer.eos:
        ids = [tokenizer.token_to_id(artifact.tokenizer.eos)]
    return frozenset(i for i in ids if i is not None)
