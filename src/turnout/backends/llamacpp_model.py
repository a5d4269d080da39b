"""A model held by llama.cpp's C functions: loading with progress, and giving it back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

from turnout.backends.llamacpp_api import Api, ProgressCallback
from turnout.backends.llamacpp_native import NativeLoadError, reason_of
from turnout.errors import LoadError

_MMAP, _READ = 1, 0  # llama_load_mode


class Model:
    """Weights and vocabulary of one GGUF file, or its vocabulary alone.

    Raises ``LoadError`` with llama.cpp's own reason for a file it refuses, and whatever ``on_progress``
    raises: that stops the load.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        *,
        device: str = "cpu",
        mmap: bool = True,
        repack: bool = True,
        vocabulary_only: bool = False,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.api = api
        if not Path(path).is_file():
            raise LoadError(f"there is no file `{path}`", code="artifact.missing")
        params = api.llama_model_default_params()
        on_cpu = device.split(":")[0] == "cpu"
        nothing = (c_void_p * 1)()  # an empty list of devices: a build for others would take one unasked
        params.devices = ctypes.addressof(nothing) if on_cpu else None
        params.n_gpu_layers = 0 if on_cpu else -1
        params.load_mode = _MMAP if mmap else _READ
        params.use_extra_bufts = repack
        params.vocab_only = vocabulary_only
        progress = _Progress(on_progress)
        params.progress_callback = ctypes.cast(progress.callback, c_void_p).value
        with api.caught() as log:
            self.address: int | None = api.llama_model_load_from_file(os.fsencode(path), params)
        if progress.failure is not None:
            self.close()
            raise progress.failure
        if not self.address:
            raise NativeLoadError(reason_of(log, "the model did not load, and no reason was logged"))
        self.vocabulary: int = api.llama_model_get_vocab(self.address)

    def close(self) -> None:
        """Frees the model, and with it its adapters; contexts must be freed before."""
        if self.address:
            with self.api.caught():
                self.api.llama_model_free(self.address)
            self.address = None


class _Progress:
    """Hands a load's progress on, and stops the load when the hearer raises."""

    def __init__(self, on_progress: Callable[[float], None] | None) -> None:
        self.failure: BaseException | None = None
        self._hear = on_progress
        self.callback = ProgressCallback(self._take)

    def _take(self, share: float, data: Any) -> bool:
        if self._hear is not None and self.failure is None:
            try:
                self._hear(share)
            except BaseException as error:  # raised again where the load ends
                self.failure = error
        return self.failure is None
