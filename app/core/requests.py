"""What a caller may send: types, bounds, and checks that name every fault by its place."""

import hashlib
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from app.core.domains import PROFILES, Profile
from app.core.errors import FAULTS_SHOWN, Fault, InvalidRequest, TooLarge
from app.core.model import MEMORY_TARGET, NewItem, Target

METADATA_BYTES = 16384
METADATA_LEVELS = 100
PROJECT = r"^[A-Za-z0-9_-]{0,64}$"
NO_NUL = r"^[^\x00]*$"
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
INTEGER_BITS = {"bigint": 63, "integer": 31, "smallint": 15}
ID_CHARACTERS = 512
CID_CHARACTERS = 64
SOURCE_BYTES, INGEST_ID_BYTES = 1536, 768
"""Both stand in one key of an index, of which a row has 2,704 bytes."""
FIELD_CHARACTERS = 60
"""As much of an unknown field's name as is told."""

Shape = TypeVar("Shape", bound=BaseModel)
Named = TypeVar("Named")

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


def _of_at_most(most: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        if len(text.encode()) > most:
            message = "takes more than {most} bytes in UTF-8"
            raise PydanticCustomError("too_many_bytes", message, {"most": most})
        return text

    return check


class EmbeddingItem(BaseModel):
    """One text for one row of a registered target; or for the job's result, by a custom_id."""

    model_config = _STRICT

    target_table: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    target_id: Annotated[str, Field(min_length=1, max_length=ID_CHARACTERS)] | int | None = None
    text: str
    custom_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    metadata: dict[str, Any] | None = None


class BatchOptions(BaseModel):
    """What holds for all items of a batch."""

    model_config = _STRICT

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    embedding_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    project: Annotated[str, Field(pattern=PROJECT)] = ""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    return_vectors: bool = False


class EmbeddingBatch(BatchOptions):
    """The body of POST /api/embeddings as JSON; each item is checked on its own."""

    items: list[Any]


class MemoryRecord(BaseModel):
    """One record of a document, of any length: it is split into chunks."""

    model_config = _STRICT

    text: str
    metadata: dict[str, Any] | None = None


class Ingest(BaseModel):
    """The body of POST /memory/ingest; each record is checked on its own."""

    model_config = _STRICT

    project: Annotated[str, Field(min_length=1, pattern=PROJECT)]
    source: Annotated[
        str, Field(min_length=1, pattern=NO_NUL), AfterValidator(_of_at_most(SOURCE_BYTES))
    ]
    ingest_id: Annotated[
        str, Field(min_length=1, pattern=NO_NUL), AfterValidator(_of_at_most(INGEST_ID_BYTES))
    ]
    records: list[Any]


class TraceParams(BaseModel):
    """How a trace request is to be answered."""

    model_config = _STRICT

    direction: str | None = None
    partial: bool = False


class TraceRequest(BaseModel):
    """The body of POST /api/trace/events; each id is checked on its own."""

    model_config = _STRICT

    profile: str
    container_ids: list[Any]
    domains: list[str]
    params: TraceParams = TraceParams()


class TargetRequest(BaseModel):
    """The body of POST /api/targets; what is left out comes from the settings."""

    model_config = _STRICT

    target_table: Annotated[str, Field(min_length=1, max_length=128, pattern=NO_NUL)]
    id_column: Annotated[str, Field(min_length=1, max_length=63, pattern=NO_NUL)]
    vector_column: Annotated[str, Field(min_length=1, max_length=63, pattern=NO_NUL)]
    model: Annotated[str, Field(min_length=1, max_length=256, pattern=NO_NUL)]
    embedding_version: (
        Annotated[str, Field(min_length=1, max_length=256, pattern=NO_NUL)] | None
    ) = None
    dimension: Annotated[int, Field(ge=1, le=16000)] | None = None
    client: Annotated[str, Field(min_length=1, max_length=128, pattern=NO_NUL)] | None = None
    prefix: Annotated[str, Field(max_length=1000, pattern=NO_NUL)] = ""
    text_column: Annotated[str, Field(min_length=1, max_length=63, pattern=NO_NUL)] | None = None


class Deletion(BaseModel):
    """The body of DELETE /api/items."""

    model_config = _STRICT

    target_table: Annotated[str, Field(min_length=1, max_length=128, pattern=NO_NUL)]
    target_ids: Annotated[list[str | int], Field(min_length=1)]


class Requeue(BaseModel):
    """The body of a requeue."""

    model_config = _STRICT

    reason: Annotated[str, Field(max_length=500, pattern=NO_NUL)] | None = None


class Nothing(BaseModel):
    """The body of a call that takes none."""

    model_config = _STRICT


def parse(shape: type[Shape], value: Any) -> Shape:  # noqa: ANN401
    """Read a body or a set of arguments as a shape; raises InvalidRequest naming every fault."""
    try:
        return shape.model_validate(value)
    except ValidationError as exc:
        faults = faults_of(exc)
        raise InvalidRequest(_summary(faults), faults=faults) from None


def _summary(faults: Sequence[Fault]) -> str:
    first = faults[0]
    where = first.field or "body"
    more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
    return f"{where}: {first.message}{more}"


_CODES = {
    "missing": ("missing", "is required"),
    "extra_forbidden": ("unknown_field", "is not a field of this call"),
    "string_type": ("wrong_type", "must be a string"),
    "string_unicode": ("wrong_form", "holds half of a surrogate pair, which is no character"),
    "int_type": ("wrong_type", "must be an integer"),
    "bool_type": ("wrong_type", "must be true or false"),
    "list_type": ("wrong_type", "must be an array"),
    "dict_type": ("wrong_type", "must be an object"),
    "model_type": ("wrong_type", "must be an object"),
    "too_short": ("too_short", "must not be empty"),
    "string_too_short": ("too_short", "must not be empty"),
    "string_too_long": ("too_long", "is too long"),
    "string_pattern_mismatch": ("wrong_form", "has characters that are not allowed"),
    "greater_than_equal": ("out_of_range", "is too small"),
    "less_than_equal": ("out_of_range", "is too large"),
}


def faults_of(
    error: ValidationError, *, index: int | None = None, is_line: bool = False
) -> list[Fault]:
    """Name the faults that a check found; never with the value itself."""
    found: dict[str, Fault] = {}
    for each in error.errors(include_url=False, include_input=False, include_context=False):
        # Every shape is flat: what follows the field is the branch of a union, and its first one
        # says enough.
        field = str(each["loc"][0])[:FIELD_CHARACTERS] if each["loc"] else None
        code, message = _said(field, each)
        found.setdefault(field or "", _fault(index, field, code, message, is_line=is_line))
    return list(found.values())


def _said(field: str | None, found: ErrorDetails) -> tuple[str, str]:
    if field is None and found["type"] == "string_unicode":
        return "unknown_field", "the name of a field holds half of a surrogate pair"
    if field == "target_id" and found["type"] == "string_type":
        return "wrong_type", "must be a string or an integer"
    if found["type"] == "too_many_bytes":
        return "too_long", found["msg"]
    return _CODES.get(found["type"], ("invalid", found["msg"]))


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace request that was found to be in order."""

    profile: str
    params: dict[str, Any]
    domains: tuple[str, ...]
    is_partial: bool
    ids: tuple[str, ...]
    """Sorted bytewise, each one once."""
    duplicates: int


def check_trace(request: TraceRequest, served: frozenset[str], *, most_ids: int) -> Traced:
    """Return a trace request in the form in which it is kept; `served` are the source's domains.

    Ids are trimmed, sorted and made unique. Raises InvalidRequest naming what is allowed, or every
    bad id; TooLarge where there are more ids than `most_ids`.
    """
    if len(request.container_ids) > most_ids:
        message = f"{len(request.container_ids)} ids, over trace_max_cids = {most_ids}"
        raise TooLarge(message, faults=[Fault("too_many_ids", message, "container_ids")])
    profile = _known(request.profile, PROFILES, "profile")
    domains = _domains(request, profile, served)
    ids = _ids(request.container_ids)
    unique = tuple(sorted(set(ids)))
    return Traced(
        profile=profile.name,
        params=request.params.model_dump(exclude_none=True),
        domains=domains,
        is_partial=request.params.partial,
        ids=unique,
        duplicates=len(ids) - len(unique),
    )


def _known(name: str, table: Mapping[Any, Named], field: str) -> Named:
    if name not in table:
        allowed = ", ".join(str(each) for each in table)
        raise _refusal("unknown_value", f"must be one of {allowed}", field)
    return table[name]


def _refusal(code: str, message: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", faults=[Fault(code, message, field)])


def _domains(request: TraceRequest, profile: Profile, served: frozenset[str]) -> tuple[str, ...]:
    direction = request.params.direction
    if None in profile.domains:
        if direction is not None:
            message = f"profile {profile.name} has no direction"
            raise _refusal("unknown_field", message, "params.direction")
        allowed = profile.domains[None]
    else:
        default = next(iter(profile.domains))
        allowed = _known(direction or str(default), profile.domains, "params.direction")
    offered = [name for name in allowed if name in served]
    bad = [name for name in request.domains if name not in offered]
    if bad or not request.domains:
        code = "unknown_value" if bad else "too_short"
        raise _refusal(code, f"must be one or more of {', '.join(offered)}", "domains")
    if len(set(request.domains)) != len(request.domains):
        raise _refusal("repeated", "names a domain twice", "domains")
    return tuple(name for name in offered if name in request.domains)


CID = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,64}")


def _ids(values: Sequence[Any]) -> list[str]:
    ids = [value.strip() if isinstance(value, str) else "" for value in values]
    if not ids:
        raise _refusal("no_items", "must name at least one container", "container_ids")
    bad = [position for position, each in enumerate(ids) if not CID.fullmatch(each)]
    if bad:
        message = "must be a text of 1 to 64 characters without control characters"
        faults = [
            Fault("id_invalid", message, "container_ids", index) for index in bad[:FAULTS_SHOWN]
        ]
        raise InvalidRequest(f"{len(bad)} of {len(ids)} container ids are invalid", faults=faults)
    return ids


def _fault(
    index: int | None, field: str | None, code: str, message: str, *, is_line: bool = False
) -> Fault:
    line = index + 1 if is_line and index is not None else None
    return Fault(code=code, message=message, field=field, index=index, line=line)


@dataclass(frozen=True, slots=True)
class Rules:
    """What items are checked against: registered targets, the batch's options, the text limit."""

    targets: Mapping[tuple[str, str | None], Target]
    """By table and version; the current version also by table and None."""
    options: BatchOptions
    client: str
    max_text_bytes: int
    is_stream: bool = False
    is_by_operator: bool = False
    job_id: str = ""
    """Of the job to be: the keys of items without a target are made of it."""
    untargeted: Mapping[str | None, Target] = field(default_factory=dict[str | None, Target])
    """What stands for their target, by model; the usual model also by None."""


def targets_by_name(registered: Sequence[Target]) -> dict[tuple[str, str | None], Target]:
    """Arrange targets as Rules looks them up."""
    found: dict[tuple[str, str | None], Target] = {}
    for target in registered:
        found[target.target_table, target.embedding_version] = target
        if target.is_current:
            found[target.target_table, None] = target
    return found


def check_item(rules: Rules, index: int, value: Any) -> NewItem | list[Fault]:  # noqa: ANN401
    """Return an item that can be stored and sent, or everything that is wrong with it."""
    try:
        item = EmbeddingItem.model_validate(value)
    except ValidationError as exc:
        missing = [
            _fault(index, name, "missing", "is missing", is_line=rules.is_stream)
            for name in _missing_places(value)
        ]
        return missing + faults_of(exc, index=index, is_line=rules.is_stream)
    encoded = _encoded(item.text)
    target_id, target, problems = _place(rules, index, item)
    problems = [
        *_text_problems(item.text, encoded, rules.max_text_bytes),
        *problems,
        *_metadata_problems(item.metadata),
    ]
    if problems or target is None or encoded is None:
        return [_fault(index, *problem, is_line=rules.is_stream) for problem in problems]
    return NewItem(
        position=index,
        target_table=target.target_table,
        target_id=target_id,
        embedding_version=target.embedding_version,
        model=target.model,
        text=item.text,
        content_hash=hashlib.sha256(encoded).digest(),
        custom_id=item.custom_id,
        metadata=item.metadata,
    )


def check_record(index: int, value: Any, *, max_bytes: int) -> MemoryRecord | list[Fault]:  # noqa: ANN401
    """Return a record that can be split and stored, or everything that is wrong with it."""
    try:
        record = MemoryRecord.model_validate(value)
    except ValidationError as exc:
        return faults_of(exc, index=index)
    problems = [
        *_text_problems(record.text, _encoded(record.text), max_bytes),
        *_metadata_problems(record.metadata),
    ]
    return [_fault(index, *problem) for problem in problems] or record


_Problem = tuple[str, str, str]


def _missing_places(value: Any) -> list[str]:  # noqa: ANN401
    """Return what an item lacks to name a row, where it may not do without."""
    if not isinstance(value, dict):
        return []
    named = cast("dict[str, Any]", value)
    missing = [name for name in ("target_table", "target_id") if named.get(name) is None]
    may_do_without = len(missing) == 2 and named.get("custom_id") is not None  # noqa: PLR2004
    return [] if may_do_without else missing


def _place(
    rules: Rules, index: int, item: EmbeddingItem
) -> tuple[str, Target | None, list[_Problem]]:
    """Return where the vector of an item goes: id, target, and what is wrong with them."""
    if item.target_table is None and item.target_id is None and item.custom_id is not None:
        target_id = f"{rules.job_id}/{index}"
        return target_id, *_untargeted(rules, target_id, item.custom_id)
    if item.target_table is None or item.target_id is None:
        message = "is missing; only an item with a custom_id may have no target"
        missing = _missing_places(item.model_dump())
        return "", None, [(name, "missing", message) for name in missing]
    target_id = str(item.target_id)
    target = _target(rules, item.target_table)
    problems = [
        *_target_problems(rules, item.target_table, target),
        *_id_problems(target_id, item.custom_id, target),
    ]
    return target_id, target, problems


def _untargeted(
    rules: Rules, target_id: str, custom_id: str
) -> tuple[Target | None, list[_Problem]]:
    options = rules.options
    target = rules.untargeted.get(options.model)
    problems = _id_problems(target_id, custom_id, target)
    if target is None:
        message = "is not the usual model nor one of a registered target, so its size is not known"
        problems.append(("model", "model_unknown", message))
    elif options.embedding_version not in (None, target.embedding_version):
        message = f"of an item without a target is {target.embedding_version}"
        problems.append(("embedding_version", "version_unknown", message))
    return target, problems


def _target(rules: Rules, table: str) -> Target | None:
    target = rules.targets.get((table, rules.options.embedding_version))
    if target and (rules.is_by_operator or is_open_to(target, rules.client)):
        return target
    return None


def is_open_to(target: Target, client: str) -> bool:
    """Whether a client may write to a target by naming its rows."""
    return target.client in (None, client) and target.target_table != MEMORY_TARGET


def deletion_faults(asked: Deletion, target: Target) -> list[Fault]:
    """Name every id that cannot be one of the target's rows."""
    message = f"is not an id of type {target.id_type} in its plain form"
    return [
        Fault("id_invalid", message, "target_ids", index)
        for index, each in enumerate(map(str, asked.target_ids))
        if not _is_storable(each) or not is_id(each, target.id_type)
    ]


def _target_problems(rules: Rules, table: str, target: Target | None) -> list[_Problem]:
    if target is None and rules.options.embedding_version and (table, None) in rules.targets:
        version = rules.options.embedding_version
        return [("embedding_version", "version_unknown", f"this target does not serve {version!r}")]
    if target is None:
        return [("target_table", "target_unknown", "is not a registered target")]
    if rules.options.model not in (None, target.model):
        message = f"version {target.embedding_version} of this target is of model {target.model}"
        return [("model", "model_mismatch", message)]
    return []


def _encoded(text: str) -> bytes | None:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


def _text_problems(text: str, encoded: bytes | None, most: int) -> list[_Problem]:
    if encoded is None:
        message = "holds half of a surrogate pair, which is no character"
        return [("text", "text_surrogate", message)]
    if "\0" in text:
        return [("text", "text_nul", "holds U+0000, which cannot be stored")]
    if not text.strip():
        return [("text", "text_empty", "is empty")]
    if len(encoded) > most:
        return [("text", "text_too_long", f"has {len(encoded)} bytes, the limit is {most}")]
    return []


def _id_problems(target_id: str, custom_id: str | None, target: Target | None) -> list[_Problem]:
    found: list[_Problem] = []
    if not _is_storable(target_id):
        found.append(("target_id", "id_invalid", "holds characters that cannot be stored"))
    elif target and not is_id(target_id, target.id_type):
        message = f"is not an id of type {target.id_type} in its plain form"
        found.append(("target_id", "id_invalid", message))
    if custom_id and not _is_storable(custom_id):
        found.append(("custom_id", "id_invalid", "holds characters that cannot be stored"))
    return found


def is_id(text: str, id_type: str) -> bool:
    """Whether a text names a row of this kind of id, in the one form that comes back unchanged."""
    match id_type:
        case "text":
            return 0 < len(text) <= ID_CHARACTERS
        case "uuid":
            try:
                return str(uuid.UUID(text)) == text
            except ValueError:
                return False
        case _:
            most = 2 ** INTEGER_BITS[id_type]
            return bool(INTEGER.fullmatch(text)) and -most <= int(text) < most


def _metadata_problems(metadata: dict[str, Any] | None) -> list[_Problem]:
    if metadata is None:
        return []
    problem = _unstorable(metadata)
    if problem:
        return [("metadata", "metadata_invalid", problem)]
    try:
        size = len(orjson.dumps(metadata))
    except (TypeError, orjson.JSONEncodeError):
        return [("metadata", "metadata_invalid", "holds a number beyond 64 bits")]
    if size > METADATA_BYTES:
        message = f"has {size} bytes, the limit is {METADATA_BYTES}"
        return [("metadata", "metadata_too_large", message)]
    return []


def _unstorable(metadata: dict[str, Any]) -> str | None:
    # Level by level and not by recursion: how deep it goes is the caller's choice.
    containers: list[Any] = [metadata]
    for _ in range(METADATA_LEVELS):
        parts = [part for each in containers for part in _parts(each)]
        problem = next(filter(None, map(_unstorable_part, parts)), None)
        if problem:
            return problem
        containers = [part for part in parts if isinstance(part, dict | list)]
        if not containers:
            return None
    return f"is nested deeper than {METADATA_LEVELS} levels"


def _parts(container: dict[str, Any] | list[Any]) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return container


def _unstorable_part(value: Any) -> str | None:  # noqa: ANN401
    if isinstance(value, str) and not _is_storable(value):
        return "holds characters that cannot be stored"
    if isinstance(value, float) and not math.isfinite(value):
        return "holds a number that is not finite"
    return None


def _is_storable(text: str) -> bool:
    return "\0" not in text and _encoded(text) is not None
