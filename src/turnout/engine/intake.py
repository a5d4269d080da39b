"""The door of the engine: a request is found good, with all it needs compiled, or refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from turnout.engine.executor import Capabilities, Vocabulary
from turnout.engine.grammar import GrammarCompiler
from turnout.engine.job import Prepared
from turnout.engine.penalties import breakers_of
from turnout.engine.processors import LogitsProcessor, resolve
from turnout.engine.request import GenerationRequest
from turnout.engine.sampler import validate
from turnout.errors import InputError
from turnout.types import Sampling

MAX_SEQUENCES = 128  # of one request: n and best_of


class Intake:
    """Checks requests against one executor. ``limit``: tokens of one sequence at most, which is the
    context, or the whole cache when that is smaller."""

    def __init__(
        self,
        capabilities: Capabilities,
        vocabulary: Vocabulary,
        limit: int,
        watermarks: Mapping[str, LogitsProcessor] | None,
    ) -> None:
        self.limit = limit
        self._capabilities = capabilities
        self._vocabulary = vocabulary
        self._watermarks = dict(watermarks or {})
        self._compiler = GrammarCompiler(vocabulary, width=capabilities.vocab_size)
        self._breakers: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def prepare(self, request: GenerationRequest, adapters: Mapping[str, int]) -> Prepared:
        """Checks a request and compiles what it needs. Raises ``InputError`` naming value, place and way
        out; safe to call from another thread."""
        sampling, capabilities = request.sampling, self._capabilities
        validate(sampling, capabilities.vocab_size)
        self._check_prompt(request)
        self.check_adapter(request, adapters)
        count = max(sampling.n, sampling.best_of or 0)
        if count > MAX_SEQUENCES:
            raise InputError(f"{count} sequences of one request asked, at most {MAX_SEQUENCES} are given")
        processors, criteria = resolve(sampling.processors, self._vocabulary)
        if sampling.watermark is not None:
            if sampling.watermark not in self._watermarks:
                known = ", ".join(sorted(self._watermarks)) or "none is configured"
                raise InputError(f"no watermark `{sampling.watermark}` (known: {known})")
            processors = [*processors, self._watermarks[sampling.watermark]]
        stop_ids = frozenset(sampling.stop_token_ids)
        ends = stop_ids if sampling.ignore_eos else stop_ids | self._vocabulary.eos_ids
        matcher = self._compiler.compile(sampling.grammar) if sampling.grammar is not None else None
        first = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        seeds = [(first + index) % (1 << 63) for index in range(count)]
        return Prepared(request, seeds, self.limit, ends, matcher, processors, criteria, self._spelled(sampling))

    def _spelled(self, sampling: Sampling) -> tuple[tuple[int, ...], ...]:
        """DRY's breakers as token ids; a pass over the vocabulary, so kept."""
        if not sampling.dry_multiplier:
            return ()
        texts = sampling.dry_sequence_breakers
        if texts not in self._breakers:
            self._breakers[texts] = breakers_of(texts, self._vocabulary)
        return self._breakers[texts]

    def check_adapter(self, request: GenerationRequest, adapters: Mapping[str, int]) -> None:
        """Raises ``InputError`` when the request names an adapter that is not among the loaded ones."""
        if request.adapter is not None and request.adapter not in adapters:
            known = ", ".join(sorted(adapters)) or "none is loaded"
            raise InputError(f"no adapter `{request.adapter}` (known: {known})", code="adapter.missing")

    def _check_prompt(self, request: GenerationRequest) -> None:
        capabilities = self._capabilities
        if not request.prompt:
            raise InputError("the prompt has no tokens", hints=["give a text, or at least a start token"])
        wanted = 1 if request.sampling.max_tokens else 0
        if len(request.prompt) + wanted > self.limit:
            which = "context" if capabilities.context <= self.limit else "cache"
            raise InputError(
                f"the prompt has {len(request.prompt)} tokens, the {which} holds {self.limit}",
                code="context.exceeded",
                hints=["shorten the prompt" if which == "context" else "shorten the prompt or enlarge the cache"],
            )
        self._check_ids(request.prompt, "")
        if (request.encoder is not None) != capabilities.encoder_decoder:
            need = "needs" if capabilities.encoder_decoder else "has no"
            raise InputError(f"this model {need} encoder input")
        if request.encoder is not None:
            if not request.encoder:
                raise InputError("the encoder input has no tokens", hints=["give a text"])
            self._check_ids(request.encoder, " of the encoder input")

    def _check_ids(self, ids: list[int], where: str) -> None:
        size = self._capabilities.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            place, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < size)
            raise InputError(f"token id {bad} at place {place}{where} is outside the vocabulary (0 to {size - 1})")
