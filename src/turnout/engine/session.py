"""One model bound to one task through the engine, request by request."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from turnout.backends.base import BindingReport, LoadPlan
from turnout.engine.core import Engine
from turnout.engine.request import Finish, GenerationRequest, Usage
from turnout.errors import TurnoutError
from turnout.tasks.contract import TextOutput
from turnout.tasks.prompting import PromptEncoder
from turnout.types import Request, Sampling


class EngineSession:
    """Session of a generating task. Closing it closes the engine."""

    honours = frozenset(Sampling.__dataclass_fields__)  # every sampling parameter

    def __init__(self, plan: LoadPlan, engine: Engine, binding: BindingReport, dtype: str) -> None:
        self.plan = plan
        self.engine = engine
        self.binding = binding
        self.dtype = dtype
        self.encoder = PromptEncoder(plan.case.artifact, plan.case.options, engine.vocabulary)
        self._numbers = itertools.count()
        self._closed = False

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Generated text of the first sequence. Raises ``InputError`` for a request that does not fit."""
        prompt, encoder = self.encoder.ids(request)
        asked = GenerationRequest(f"s{next(self._numbers)}", prompt, request.sampling, encoder=encoder)
        self.engine.add(asked)
        pieces: list[str] = []
        finish, usage = Finish.ERROR, Usage()
        try:
            while self.engine.has_work:
                for event in self.engine.step():
                    if event.error:
                        raise TurnoutError(event.error, code=event.code)
                    if event.index == 0:
                        pieces.append(event.text)
                        finish = event.finish or finish
                        if emit is not None and event.text:
                            emit(event.text)
                    usage = event.usage or usage
        except BaseException:  # the listener's, for instance: the next request starts on an empty engine
            self.engine.cancel(asked.id)
            while self.engine.has_work:
                self.engine.step()
            raise
        return TextOutput("".join(pieces), finish.value, len(encoder or prompt), usage.completion)

    def close(self) -> None:
        """Frees the model; may be called twice."""
        if not self._closed:
            self._closed = True
            self.engine.close()
