"""The file of an operator's own SELECTs, one a domain, that sources of traces read."""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path

from app.core.domains import DOMAINS, Domain, Kind
from app.core.errors import ConfigError

SETTING = "TRACE_SOURCE_QUERIES"
KNOWN = frozenset({"ids", "as_of"})
NEEDED = {"holds": KNOWN}
"""What a SELECT must ask for where that is more than the ids: holds are measured up to `as_of`."""
STRAY = "%"
_BEGINNING = re.compile(r"(\s|--[^\n]*\n)*(SELECT|WITH)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Queries:
    """What such a file holds: SELECTs by domain, and what else the source lets it say."""

    selects: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


def read_queries(
    path: Path, placeholder: re.Pattern[str], *, settings: Collection[str] = ()
) -> Queries:
    """Read a TOML file whose keys are domains, or one of `settings`.

    The first group of `placeholder` is the name of one; it may match other things as well, so that
    none is found inside them. Raises ConfigError with everything that is wrong.
    """
    table = _table(path)
    selects = {name: value for name, value in table.items() if name not in settings}
    others = {name: value for name, value in table.items() if name in settings}
    faults = [f"{name}: must be text" for name, value in others.items() if not _is_text(value)]
    for name, select in selects.items():
        faults += _faults(name, select, placeholder)
    if not selects:
        faults.append("there is no SELECT of any domain in it")
    if faults:
        raise ConfigError([f"{SETTING}: {fault}" for fault in faults])
    return Queries(
        {name: str(select).strip().removesuffix(";") for name, select in selects.items()},
        {name: str(value) for name, value in others.items()},
    )


def mismatch(
    domain: Domain, found: Sequence[tuple[str, str]], types: Mapping[Kind, Collection[str]]
) -> str | None:
    """Say of the first column that is not the domain's what it is and what it should be.

    `found` are names and types, `types` the types that a kind of column may have.
    """
    for number, (column, other) in enumerate(zip_longest(domain.columns, found), 1):
        name, kind = other or ("missing", "")
        if column is None or column.name != name:
            return f"column {number} is {name}, expected {column.name if column else 'none'}"
        if kind not in types[column.kind]:
            return f"{name} is {kind}, expected {' or '.join(sorted(types[column.kind]))}"
    return None


def _table(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError([f"{SETTING}: cannot be read ({type(exc).__name__})"]) from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError([f"{SETTING}: is not TOML: {exc}"]) from exc


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _faults(name: str, select: object, placeholder: re.Pattern[str]) -> list[str]:
    if name not in DOMAINS:
        near = get_close_matches(name, DOMAINS, n=1)
        return [f"there is no domain {name!r}" + (f"; did you mean {near[0]}?" if near else "")]
    if not isinstance(select, str) or not _BEGINNING.match(select):
        return [f"{name}: must be one SELECT"]
    found = list(placeholder.finditer(select))
    names = {each[1] for each in found if each[1]}
    faults = [f"{name}: does not use {each}" for each in sorted(_needed(name) - names)]
    faults += [f"{name}: there is no placeholder {each!r}" for each in sorted(names - KNOWN)]
    if any(each[0] == STRAY for each in found):
        faults.append(f"{name}: a percent sign is written %%")
    return faults


def _needed(name: str) -> frozenset[str]:
    return NEEDED.get(name, frozenset({"ids"}))
