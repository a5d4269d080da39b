"""llama.cpp's C functions, called through ctypes in whichever library is installed.

Two packages carry the same functions. ``llama-cpp-python`` is compiled on the machine and so has its
processor's own kernels; ``xllamacpp`` is prebuilt, and its one library exports every C function although
its Python side offers only the server. Either is called here directly: a C structure has no description
that could be asked, so the layouts declared below are *proven* before anything is loaded. llama.cpp fills
its parameters with defaults itself, and each field must hold the known one; where the calling convention
allows it, the bytes that were written must be those of the declaration, no more and no fewer. What does
not fit is refused by name.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnout.backends.llamacpp_native import library
from turnout.errors import LoadError, UsageError

Field = tuple[str, Any, Any]  # name, C type, the default that llama.cpp must give it (``ANY``: not compared)
ANY = object()
LIBRARIES = ("llama_cpp", "xllamacpp")  # native kernels first
_INSTALL = "install a build this version knows: `pip install xllamacpp==2026.10.11549`"
_GUARD = 256  # bytes behind a returned structure, for a library whose own is longer than declared

# Order and types of the fields are llama.cpp's (include/llama.h of builds b11500 to b11549).
MODEL_FIELDS: tuple[Field, ...] = (
    ("devices", c_void_p, None),
    ("tensor_buft_overrides", c_void_p, None),
    ("n_gpu_layers", c_int32, -1),
    ("split_mode", c_int32, 1),
    ("load_mode", c_int32, -1),
    ("lazy_mode", c_int32, 1),
    ("main_gpu", c_int32, 0),
    ("tensor_split", c_void_p, None),
    ("progress_callback", c_void_p, None),
    ("progress_data", c_void_p, None),
    ("kv_overrides", c_void_p, None),
    ("vocab_only", c_bool, False),
    ("check_tensors", c_bool, False),
    ("use_extra_bufts", c_bool, True),
    ("no_host", c_bool, False),
    ("no_alloc", c_bool, False),
    ("load_mtp", c_bool, False),
)


def context_fields(pointers: int) -> tuple[Field, ...]:
    """Fields of the context's parameters, with ``pointers`` words between cache types and flags.

    Newer builds have three there, older ones two; nothing of them is set from here, so which is which
    does not matter.
    """
    return (
        ("n_ctx", c_uint32, 512),
        ("n_batch", c_uint32, 2048),
        ("n_ubatch", c_uint32, 512),
        ("n_seq_max", c_uint32, 1),
        ("n_rs_seq", c_uint32, 0),
        ("n_outputs_max", c_uint32, 0),
        ("n_outputs_max_per_seq", c_uint32, 1),
        ("n_threads", c_int32, 4),
        ("n_threads_batch", c_int32, 4),
        ("ctx_type", c_int32, 0),
        ("rope_scaling_type", c_int32, -1),
        ("pooling_type", c_int32, -1),
        ("attention_type", c_int32, -1),
        ("flash_attn_type", c_int32, -1),
        ("rope_freq_base", c_float, 0.0),
        ("rope_freq_scale", c_float, 0.0),
        ("yarn_ext_factor", c_float, -1.0),
        ("yarn_attn_factor", c_float, -1.0),
        ("yarn_beta_fast", c_float, -1.0),
        ("yarn_beta_slow", c_float, -1.0),
        ("yarn_orig_ctx", c_uint32, 0),
        ("defrag_thold", c_float, -1.0),
        ("cb_eval", c_void_p, None),
        ("cb_eval_data", c_void_p, None),
        ("type_k", c_int32, 1),  # f16
        ("type_v", c_int32, 1),
        *((f"pointer_{index}", c_uint64, 0) for index in range(pointers)),
        ("embeddings", c_bool, False),
        ("offload_kqv", c_bool, True),
        ("no_perf", c_bool, True),
        ("op_offload", c_bool, True),
        ("swa_full", c_bool, True),
        ("kv_unified", c_bool, False),
        ("samplers", c_void_p, None),
        ("n_samplers", c_size_t, 0),
        ("ctx_other", c_void_p, None),
    )


CONTEXT_LAYOUTS = (context_fields(3), context_fields(2))


class Batch(ctypes.Structure):
    """Tokens of one call, [n_tokens] each: ids, positions, one sequence id by pointer, output flags."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    ]


ProgressCallback = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)
_LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_LOG_LEVELS = {3: "W", 4: "E"}  # what is kept; loading says thousands of other lines
_LOG_CONTINUES = 5

# Result and arguments of the functions used, without the two that depend on the proven layouts.
_P = c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_version": (c_char_p, ()),
    "llama_backend_init": (None, ()),
    "ggml_backend_load_all": (None, ()),
    "ggml_backend_dev_count": (c_size_t, ()),
    "llama_log_get": (None, (_P, _P)),
    "llama_log_set": (None, (_P, _P)),
    "llama_model_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_n_ctx_train": (c_int32, (_P,)),
    "llama_model_n_swa": (c_int32, (_P,)),
    "llama_model_size": (c_uint64, (_P,)),
    "llama_model_has_encoder": (c_bool, (_P,)),
    "llama_model_has_decoder": (c_bool, (_P,)),
    "llama_model_is_recurrent": (c_bool, (_P,)),
    "llama_model_is_hybrid": (c_bool, (_P,)),
    "llama_model_is_diffusion": (c_bool, (_P,)),
    "llama_free": (None, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_n_ctx": (c_uint32, (_P,)),
    "llama_n_ctx_seq": (c_uint32, (_P,)),
    "llama_n_batch": (c_uint32, (_P,)),
    "llama_n_ubatch": (c_uint32, (_P,)),
    "llama_n_seq_max": (c_uint32, (_P,)),
    "llama_n_threads": (c_int32, (_P,)),
    "llama_n_threads_batch": (c_int32, (_P,)),
    "llama_set_n_threads": (None, (_P, c_int32, c_int32)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (c_int32, (_P, Batch)),
    "llama_get_logits": (_P, (_P,)),
    "llama_memory_seq_rm": (c_bool, (_P, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (_P, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (_P, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (_P, c_int32)),
    "llama_state_seq_get_size_ext": (c_size_t, (_P, c_int32, c_uint32)),
    "llama_state_seq_get_data_ext": (c_size_t, (_P, _P, c_size_t, c_int32, c_uint32)),
    "llama_state_seq_set_data_ext": (c_size_t, (_P, _P, c_size_t, c_int32, c_uint32)),
    "llama_adapter_lora_init": (_P, (_P, c_char_p)),
    "llama_adapter_lora_free": (None, (_P,)),
    "llama_adapter_get_alora_n_invocation_tokens": (c_uint64, (_P,)),
    "llama_set_adapters_lora": (c_int32, (_P, _P, c_size_t, _P)),
    "llama_tokenize": (c_int32, (_P, c_char_p, c_int32, _P, c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (_P, c_int32, _P, c_int32, c_int32, c_bool)),
    "llama_detokenize": (c_int32, (_P, _P, c_int32, _P, c_int32, c_bool, c_bool)),
    "llama_vocab_n_tokens": (c_int32, (_P,)),
    "llama_vocab_bos": (c_int32, (_P,)),
    "llama_vocab_is_eog": (c_bool, (_P, c_int32)),
    "llama_vocab_get_attr": (c_int32, (_P, c_int32)),
}


# ---- proof ---------------------------------------------------------------------------------


def structure(name: str, fields: Sequence[Field]) -> type[ctypes.Structure]:
    """A C structure of these fields."""
    return type(name, (ctypes.Structure,), {"_fields_": [(field, kind) for field, kind, _ in fields]})


def disproof(function: Any, fields: Sequence[Field]) -> str:
    """Why the structure that ``function`` (no arguments) returns does not have ``fields``; '' if it has.

    Compares every field with its default and, on x86-64, the written bytes with the declared ones. The
    function's declared types are changed by this.
    """
    declared = structure("Declared", fields)
    guarded = structure("Guarded", (("value", declared, ANY), ("rest", ctypes.c_ubyte * _GUARD, ANY)))
    function.argtypes, function.restype = (), guarded
    value = function().value
    for name, _, default in fields:
        found = getattr(value, name)
        if default is not ANY and found != default:
            return f"field `{name}` is {found}, not {default}"
    return _extent(function, declared, fields)


def _extent(function: Any, declared: type[ctypes.Structure], fields: Sequence[Field]) -> str:
    """Compares the bytes that the function writes with the declaration; '' where they agree.

    On x86-64 a long structure is returned in memory whose address is a hidden first argument, in the
    System V and in the Windows convention. Two calls over different fillings tell which bytes are written.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    size = ctypes.sizeof(declared)
    function.argtypes, function.restype = (c_void_p,), c_void_p
    written = set(range(size + _GUARD))
    fillings = [bytes([mark]) * (size + _GUARD) for mark in (0xA5, 0x5A)]
    for filling in fillings:
        buffer = ctypes.create_string_buffer(filling, len(filling))
        function(ctypes.addressof(buffer))
        written &= {index for index, byte in enumerate(buffer.raw) if byte != filling[index]}
    wanted = set()
    for name, *_ in fields:
        field = getattr(declared, name)
        wanted |= set(range(field.offset, field.offset + field.size))
    if not wanted <= written:
        missing = min(wanted - written)
        return f"byte {missing} of {size} declared ones is never written"
    beyond = [index for index in written if index >= size]
    return f"{max(beyond) + 1} bytes are written, {size} are declared" if beyond else ""


def batch_disproof(api: Any) -> str:
    """Why llama.cpp's batch is not ``Batch``; '' if it is. ``api`` has the two functions for batches."""
    batch = api.llama_batch_init(3, 0, 1)
    pointers = {field[0]: bool(getattr(batch, field[0])) for field in Batch._fields_[1:]}
    expected = {name: name != "embd" for name in pointers}
    found = "" if batch.n_tokens == 0 and pointers == expected else f"a fresh batch has {pointers}"
    if not found:
        rows = ctypes.cast(batch.seq_id, ctypes.POINTER(c_void_p))
        ended = all(rows[index] for index in range(3)) and not rows[3]
        found = "" if ended else "its sequence ids do not end with a null pointer"
        api.llama_batch_free(batch)
    return found


# ---- the library ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layouts:
    """The structures that were proven for one library."""

    model: type[ctypes.Structure]
    context: type[ctypes.Structure]


class Api:
    """llama.cpp in this process. Functions keep their C names: ``api.llama_decode(context, batch)``.

    Calls release the interpreter's lock while they run. Raises ``LoadError`` (``dependency.version``)
    for a library that lacks a function or lays a structure out in an unknown way.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise LoadError(f"llama.cpp of `{name}` cannot be loaded: {error}", code="dependency.missing") from None
        self._bind()
        self.layouts = self._proven()
        self.version: str = (self.llama_version() or b"").decode()
        self.package_version = installed(name)
        self._lines: list[str] = []
        self._callback = _LogCallback(self._take)
        self._callback_address = ctypes.cast(self._callback, c_void_p).value
        self.llama_backend_init()
        if not self.ggml_backend_dev_count():
            self.ggml_backend_load_all()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"llama.cpp's function `{name}` is not declared here")

    def _bind(self) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = self._function(name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def _function(self, name: str) -> Any:
        try:
            return self._library[name]
        except AttributeError:
            raise self.refusal(f"it has no function `{name}`") from None

    def refusal(self, why: str) -> LoadError:
        """The error for a library whose interface is not the known one."""
        text = f"llama.cpp of `{self.name}` ({installed(self.name) or 'unknown version'}) has another interface: {why}"
        return LoadError(text, code="dependency.version", hints=[_INSTALL])

    def _proven(self) -> Layouts:
        why = disproof(self._function("llama_model_default_params"), MODEL_FIELDS)
        if why:
            raise self.refusal(f"llama_model_params: {why}")
        if why := batch_disproof(self):
            raise self.refusal(f"llama_batch: {why}")
        model = structure("ModelParams", MODEL_FIELDS)
        for fields in CONTEXT_LAYOUTS:
            why = disproof(self._function("llama_context_default_params"), fields)
            if not why:
                context = structure("ContextParams", fields)
                self._declare(model, context)
                return Layouts(model, context)
        raise self.refusal(f"llama_context_params: {why}")

    def _declare(self, model: type[ctypes.Structure], context: type[ctypes.Structure]) -> None:
        for name, result, arguments in (
            ("llama_model_default_params", model, ()),
            ("llama_context_default_params", context, ()),
            ("llama_model_load_from_file", c_void_p, (c_char_p, model)),
            ("llama_init_from_model", c_void_p, (c_void_p, context)),
        ):
            function = self._function(name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    # -- log --

    def _take(self, level: int, text: bytes | None, data: object) -> None:
        line = (text or b"").decode("utf-8", "replace").rstrip("\n")
        if level == _LOG_CONTINUES and self._lines:
            self._lines[-1] += line
        elif level in _LOG_LEVELS:
            self._lines.append(f"0 {_LOG_LEVELS[level]} {line}")

    @contextmanager
    def caught(self) -> Iterator[list[str]]:
        """Lines that llama.cpp logs meanwhile, as its server writes them (``0 E text``). The logger that
        was set before, perhaps the server's own, is set again."""
        before = self.catch()
        try:
            yield self._lines
        finally:
            self.release(before)

    def catch(self) -> tuple[int | None, int | None]:
        """Begins to collect what is logged, in ``lines``; answers the logger to give to ``release``."""
        callback, data = c_void_p(), c_void_p()
        self.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
        self._lines = []
        self.llama_log_set(self._callback_address, None)
        return callback.value, data.value

    def release(self, logger: tuple[int | None, int | None]) -> None:
        """Gives the log back to the logger from before ``catch``."""
        self.llama_log_set(*logger)

    @property
    def lines(self) -> list[str]:
        """What was logged since the last ``catch``."""
        return self._lines


def installed(name: str) -> str:
    """Version of the package that carries the library ``name``, '' when absent."""
    try:
        return version({"llama_cpp": "llama_cpp_python"}.get(name, name))
    except PackageNotFoundError:
        return ""


@cache
def of_xllamacpp() -> Api:
    """llama.cpp inside ``xllamacpp``'s extension module, which is imported so that it is loaded once."""
    library()
    path = getattr(sys.modules.get("xllamacpp.xllamacpp"), "__file__", None)
    if path is None:
        raise LoadError("`xllamacpp` has no extension module", code="dependency.version", hints=[_INSTALL])
    return Api(path, "xllamacpp")


@cache
def of_llama_cpp() -> Api:
    """llama.cpp of ``llama-cpp-python``; its Python side, with more dependencies, is not imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in ``library``: threads sleep while they wait
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    path = _llama_cpp_path()
    if path is None:
        raise LoadError("the package `llama-cpp-python` is absent", code="dependency.missing")
    return Api(str(path), "llama_cpp")


def _llama_cpp_path() -> Path | None:
    spec = find_spec("llama_cpp")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder, "lib").glob("*llama.*")) if _is_library(path)]
    return found[0] if found else None


def _is_library(path: Path) -> bool:
    return path.name in ("libllama.so", "libllama.dylib", "llama.dll")


MAKERS: dict[str, Callable[[], Api]] = {"llama_cpp": of_llama_cpp, "xllamacpp": of_xllamacpp}


def open_api(choice: str = "auto") -> Api:
    """The library named by ``choice`` (``llama_cpp``, ``xllamacpp``), or for ``auto`` the first installed.

    Raises ``UsageError`` for another name, ``LoadError`` where the library is absent or does not fit.
    """
    if choice != "auto" and choice not in MAKERS:
        raise UsageError(f"llama.cpp library `{choice}` is unknown; known: auto, {', '.join(LIBRARIES)}")
    if choice == "auto":
        choice = next((name for name in LIBRARIES if find_spec(name) is not None), "xllamacpp")
    if find_spec(choice) is None:
        extra = "llamacpp-native" if choice == "llama_cpp" else "llamacpp"
        raise LoadError(
            f"the package of `{choice}` is absent",
            code="dependency.missing",
            hints=[f"pip install 'turnout[{extra}]'"],
        )
    return MAKERS[choice]()
