"""What a backend is and what it says: requirements, reasons, remedies, verdicts, plans, evidence.

A *case* is one artifact for one task with options on a device. A backend lists every requirement
of a case (none stops the others); the resolver turns them into one verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from turnout.package.facts import Artifact, ArtifactKind
from turnout.types import Request


class Kind(StrEnum):
    """What a requirement is about."""

    ARTIFACT = "artifact"
    INTEGRITY = "integrity"
    ARCHITECTURE = "architecture"
    CONFIG = "config"
    COMPONENT = "component"
    TENSOR = "tensor"
    OPERATOR = "operator"
    DTYPE = "dtype"
    QUANTIZATION = "quantization"
    SHAPE = "shape"
    RECIPE = "recipe"
    TASK_HEAD = "task_head"
    DEPENDENCY = "dependency"
    DEVICE = "device"
    MEMORY = "memory"
    OPTION = "option"
    TRUST = "trust"
    LICENCE = "licence"


class State(StrEnum):
    """State of a requirement."""

    MET = "met"
    UNMET = "unmet"
    UNKNOWN = "unknown"
    WAIVED = "waived"


class Action(StrEnum):
    """What a remedy does. The first group keeps the case; the second makes it another case."""

    INSTALL = "install"
    UPGRADE = "upgrade"
    SET_OPTION = "set_option"
    GRANT_TRUST = "grant_trust"

    SELECT_ARTIFACT = "select_artifact"
    CONVERT = "convert"
    ADD_FILE = "add_file"
    REDOWNLOAD = "redownload"
    CHOOSE_TASK = "choose_task"
    CHOOSE_DEVICE = "choose_device"
    FREE_MEMORY = "free_memory"


# With one of these the same case becomes supported, so it is conditional rather than unsupported.
SAME_CASE = frozenset({Action.INSTALL, Action.UPGRADE, Action.SET_OPTION, Action.GRANT_TRUST})


class VerdictStatus(StrEnum):
    """supported: all met. conditional: what is unmet has a remedy the caller may apply to this
    very case. unsupported: the case cannot run. unknown: nothing unmet, something not known."""

    SUPPORTED = "supported"
    CONDITIONAL = "conditional"
    UNKNOWN = "unknown"
    UNSUPPORTED = "unsupported"


class EvidenceLevel(IntEnum):
    """How far a case was proven."""

    DECLARED = 0
    INSPECTED = 1
    INQUIRED = 2
    DRY_LOADED = 3
    LOADED = 4
    EXECUTED = 5
    REFERENCE_MATCHED = 6
    SERVED = 7


class Outcome(StrEnum):
    """``fail``: the answer is no. ``error``: the question could not be put."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"


@dataclass(slots=True)
class Cost:
    """Estimated cost of a remedy."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Remedy:
    """A way out that can be executed; ``argv`` is a command line, None when a person must act.

    A ``speculative`` one may or may not help (a newer version nobody has asked): it is offered, and
    leaves the verdict what it is.
    """

    action: Action
    text: str
    argv: list[str] | None = None
    cost: Cost = field(default_factory=Cost)
    changes_numerics: bool = False
    changes_trust: bool = False
    speculative: bool = False


@dataclass(slots=True)
class Reason:
    """Smallest true gap: what was expected, what was observed, where."""

    code: str
    message: str
    observed: str = ""
    expected: str = ""
    where: str = ""

    @property
    def boundary(self) -> str:
        """First part of the code."""
        return self.code.split(".", 1)[0]


@dataclass(slots=True)
class Requirement:
    """One predicate of a case with its state; ``reason`` is set unless it is met."""

    id: str
    kind: Kind
    state: State
    subject: str = ""
    expected: str = ""
    observed: str = ""
    reason: Reason | None = None
    remedies: list[Remedy] = field(default_factory=list)


@dataclass(slots=True)
class BackendBuild:
    """Identity of an installed backend. ``version`` is '' when it is not installed."""

    name: str
    version: str = ""
    dependencies: dict[str, str] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=lambda: ["cpu"])
    unavailable: str = ""  # why it cannot be used here; '' when it can
    missing: list[str] = field(default_factory=list)  # distributions to install
    extra: str = ""  # turnout's extra that installs it

    @property
    def available(self) -> bool:
        """Whether the backend's libraries are installed."""
        return not self.unavailable


@dataclass(slots=True)
class Case:
    """One artifact for one task with options on a device. ``root`` is the package's root."""

    root: str
    artifact: Artifact
    task: str
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def file(self, rel: str) -> str:
        """Absolute path of a file (or '' / '.' for the root) of the package."""
        return self.root if rel in ("", ".") else f"{self.root}/{rel}"


@dataclass(slots=True)
class CaseKey:
    """Everything a piece of evidence depends on."""

    artifact_digest: str
    artifact: str
    task: str
    options: str
    backend: str
    build: str
    dependencies: str
    device: str
    recipe: str
    adapter: int = 1  # revision of turnout's own backend adapter

    @property
    def id(self) -> str:
        """SHA-256 of the key, hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class BindingReport:
    """Where every tensor of the model came from. ``unresolved`` must be empty after a load."""

    loaded: int = 0
    tied: list[str] = field(default_factory=list)
    transformed: list[str] = field(default_factory=list)
    initialised_by_design: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Evidence:
    """What one rung of the ladder showed; ``reasons`` say why when it failed."""

    level: EvidenceLevel
    outcome: Outcome
    reasons: list[Reason] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    measurements: dict[str, float] = field(default_factory=dict)
    binding: BindingReport | None = None
    reference: str = ""
    log: str = ""
    at: float = 0.0
    duration: float = 0.0


@dataclass(slots=True)
class LoadPlan:
    """What a load will do: pure data, decided before anything is loaded."""

    case: Case
    backend: str
    implementation: str = ""  # class, graph or architecture that will compute
    dtype: str = ""
    files: list[str] = field(default_factory=list)
    recipe: str = ""


@dataclass(slots=True)
class Estimates:
    """Bytes and seconds expected; ``peak`` at load with ``context`` tokens of cache."""

    weights: int = 0
    kv_per_token: int = 0
    context: int = 0
    peak: int = 0
    load_s: float = 0.0


class Admission(StrEnum):
    """Whether a compatible case may be loaded now; never part of compatibility."""

    ADMITTED = "admitted"
    DENIED_POLICY = "denied_policy"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    NOT_CHECKED = "not_checked"


@dataclass(slots=True)
class Verdict:
    """The one answer for a case on a backend, with all reasons and remedies."""

    artifact: str
    kind: ArtifactKind
    task: str
    backend: str
    device: str
    status: VerdictStatus
    level: EvidenceLevel
    reasons: list[Reason] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    unknowns: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    estimates: Estimates = field(default_factory=Estimates)
    admission: Admission = Admission.NOT_CHECKED
    admission_detail: str = ""
    measurements: dict[str, float] = field(default_factory=dict)
    key: CaseKey | None = None
    plan: LoadPlan | None = None


class Session(Protocol):
    """A loaded model bound to a task. One thread at a time."""

    plan: LoadPlan
    binding: BindingReport
    dtype: str

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> Any:
        """Output value of the task's contract. ``emit`` receives pieces of text as they come.

        Raises ``InputError`` for a request that does not fit.
        """
        ...

    def close(self) -> None:
        """Frees what the session holds; may be called twice."""
        ...


class Backend(Protocol):
    """One way to run artifacts. Only the module that defines it imports its library."""

    name: str
    reads: frozenset[ArtifactKind]
    tasks: frozenset[str]

    def describe(self) -> BackendBuild:
        """Version, dependencies, devices; must not import the library (metadata only)."""
        ...

    def devices(self) -> list[str]:
        """Devices as the library reports them; may import the library. Runs in a worker."""
        ...

    def requirements(self, case: Case) -> list[Requirement]:
        """Every requirement of the case beyond ``requirements.common``; no early exit. May import
        the library to ask it; reads no weights. Runs in a worker."""
        ...

    def inquire(self, case: Case) -> list[Evidence]:
        """What the runtime's own tables say of the case; no weights."""
        ...

    def plan(self, case: Case) -> LoadPlan:
        """How the case would be loaded."""
        ...

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Binds everything without computing; reads no more than headers where possible."""
        ...

    def load(self, plan: LoadPlan) -> Session:
        """Loads as a transaction: a session whose binding has nothing unresolved, or ``LoadError``."""
        ...

    def probe(self, session: Session) -> Evidence:
        """Runs the smallest real request of the session's task and checks its output."""
        ...


def met(id: str, kind: Kind, subject: str = "", observed: str = "") -> Requirement:
    """A requirement that holds."""
    return Requirement(id, kind, State.MET, subject, observed=observed)


def unmet(
    kind: Kind,
    code: str,
    message: str,
    *,
    observed: str = "",
    expected: str = "",
    where: str = "",
    remedies: list[Remedy] | None = None,
) -> Requirement:
    """A requirement that does not hold; its id is the reason's code."""
    reason = Reason(code, message, observed, expected, where)
    return Requirement(code, kind, State.UNMET, where, expected, observed, reason, remedies or [])


def unknown(
    kind: Kind, code: str, message: str, *, observed: str = "", expected: str = "", where: str = ""
) -> Requirement:
    """A requirement nobody could answer; ``message`` says what would settle it."""
    reason = Reason(code, message, observed, expected, where)
    return Requirement(code, kind, State.UNKNOWN, where, expected, observed, reason)


def passed(level: EvidenceLevel, **more: Any) -> Evidence:
    """Evidence that a rung held."""
    return Evidence(level, Outcome.PASS, **more)


def failed(
    level: EvidenceLevel,
    code: str,
    message: str,
    *,
    observed: str = "",
    expected: str = "",
    where: str = "",
    remedies: list[Remedy] | None = None,
    **more: Any,
) -> Evidence:
    """Evidence that a rung did not hold, with its reason."""
    return Evidence(level, Outcome.FAIL, [Reason(code, message, observed, expected, where)], remedies or [], **more)
