import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import config
from app.core.config import Settings, is_loopback
from app.core.errors import ConfigError
from tests.processes import ROOT

GOOD = {"DATABASE_URL": "postgresql://u@h/db", "REDIS_URL": "redis://h/1"}
SECRET = "hunter2-not-to-be-seen"


def faults(**environ: str) -> tuple[str, ...]:
    """Return what is wrong with an environment."""
    with pytest.raises(ConfigError) as caught:
        config.load({**GOOD, **environ})
    return caught.value.faults


def load(**environ: str) -> Settings:
    return config.load({**GOOD, **environ})


def test_what_is_not_set_has_its_default() -> None:
    settings = load(UNRELATED="x", EMBEDDER_API_KEY="  ")

    changed = {"database_url", "redis_url"}
    for each in fields(Settings):
        assert each.name in changed or getattr(settings, each.name) == each.default


def test_each_kind_of_value_is_read_as_its_kind() -> None:
    settings = load(
        QUEUE_BATCH_SIZE=" 7 ", SWEEP_SECONDS="0.5", ENABLE_QUEUE_WORKER="Off", EMBEDDING_MODEL="m"
    )

    assert settings.queue_batch_size == 7
    assert settings.sweep_seconds == 0.5
    assert settings.enable_queue_worker is False
    assert settings.embedding_model == "m"


def test_every_fault_is_named_at_once() -> None:
    found = faults(
        DATABASE_URL="",
        REDIS_URL="http://h",
        QUEUE_BATCH_SIZE="many",
        QUEUE_MAX_RETRIES="21",
        SWEEP_SECONDS="nan",
        QUEUE_BELL_SECONDS="inf",
        ENABLE_QUEUE_WORKER="perhaps",
        AUTH="maybe",
        EMBEDDER_URL="ftp://h",
        QUEUE_PROJECT="a b",
        RQ_KEY_PREFIX="a:b",
        CLEANUP_DONE_DAYS="31",
        EMBEDING_DIM="8",
    )

    assert sorted(each.partition(":")[0] for each in found) == sorted(
        [
            *("DATABASE_URL", "REDIS_URL", "QUEUE_BATCH_SIZE", "QUEUE_MAX_RETRIES"),
            *("SWEEP_SECONDS", "QUEUE_BELL_SECONDS", "ENABLE_QUEUE_WORKER", "AUTH"),
            *("EMBEDDER_URL", "QUEUE_PROJECT", "RQ_KEY_PREFIX", "CLEANUP_JOB_DAYS"),
            "EMBEDING_DIM",
        ]
    )


def test_every_number_is_refused_beyond_its_bounds_and_taken_at_them() -> None:
    for each in fields(Settings):
        least, most = each.metadata["least"], each.metadata["most"]
        if least is None:
            continue
        name = each.name.upper()
        keeps = {"CLEANUP_JOB_DAYS": "3650"} if name == "CLEANUP_DONE_DAYS" else {}
        if name == "CLEANUP_JOB_DAYS":
            keeps = {"CLEANUP_DONE_DAYS": "1"}

        assert getattr(load(**{**keeps, name: str(least)}), each.name) == least
        assert getattr(load(**{**keeps, name: str(most)}), each.name) == most
        for beyond in (least - 1, most + 1, -(10**30), 10**30):
            assert any(fault.startswith(name) for fault in faults(**{**keeps, name: str(beyond)}))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DATABASE_ULR", "DATABASE_URL"),
        ("QUEUE_MAX_RETRY", None),
        ("QUEUE_MAX_RETRIE", "QUEUE_MAX_RETRIES"),
        ("EMBEDDING_DIMM", "EMBEDDING_DIM"),
        ("EMBEDDER_API_KEY_FIL", "EMBEDDER_API_KEY_FILE"),
        ("EMBEDDING_DIM_FILE", None),
        ("HOSTNAME", None),
        ("POSTGRES_URL", None),
        ("QUEUE", None),
        ("PORTS", None),
    ],
)
def test_a_name_one_or_two_letters_off_is_a_fault_and_any_other_is_left_alone(
    name: str, meant: str | None
) -> None:
    if meant is None:
        load(**{name: "x"})
    else:
        assert faults(**{name: "x"}) == (f"{name}: unknown; did you mean {meant}?",)


def test_a_secret_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")

    assert load(EMBEDDER_API_KEY_FILE=str(path)).embedder_api_key == SECRET


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")

    assert faults(REDIS_URL_FILE=str(tmp_path / "none"), EMBEDDER_API_KEY_FILE=str(binary)) == (
        "REDIS_URL_FILE: cannot be read (FileNotFoundError)",
        "EMBEDDER_API_KEY_FILE: cannot be read (UnicodeDecodeError)",
        "REDIS_URL: must be set",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", f"mysql://u:{SECRET}@h/db"),
        ("DATABASE_URL", f"postgresql://u:{SECRET}@[::1/db"),
        ("REDIS_URL", f"http://:{SECRET}@h"),
        ("REDIS_URL", f"redis://:{SECRET}@[h"),
        ("EMBEDDER_URL", f"ftp://u:{SECRET}@h"),
        ("EMBEDDER_URL", f"http://u:{SECRET}@[h"),
    ],
)
def test_a_wrong_url_is_one_fault_that_does_not_show_it(name: str, value: str) -> None:
    found = faults(**{name: value})

    assert len(found) == 1
    assert found[0].startswith(f"{name}: ")
    assert SECRET not in found[0]


def test_a_url_of_several_hosts_is_left_to_the_driver() -> None:
    url = "postgresql://u@h1:5432,h2:5433/db?target_session_attrs=read-write"

    assert load(DATABASE_URL=url).database_url == url


def test_a_secret_is_not_part_of_what_settings_look_like() -> None:
    environ = {
        "DATABASE_URL": f"postgresql://u:{SECRET}@h/db",
        "REDIS_URL": f"redis://:{SECRET}@h/1",
        "EMBEDDER_API_KEY": SECRET,
    }

    settings = config.load(environ)

    assert SECRET in settings.database_url
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.com", False)),  # noqa: S104
        ("localhost.example.com", False),
    ],
)
def test_without_keys_it_is_for_loopback_only(host: str, is_ours: bool) -> None:  # noqa: FBT001
    assert is_loopback(host) == is_ours
    if is_ours:
        assert load(HOST=host, AUTH="off").auth == "off"
    else:
        assert faults(HOST=host, AUTH="off") == (
            f"AUTH=off is for loopback only, but HOST is {host}",
        )


def test_what_a_command_sets_wins_over_the_environment() -> None:
    settings = config.load({**GOOD, "EMBEDDER": "openai", "PORT": "no"}, embedder="local", port=0)

    assert (settings.embedder, settings.port) == ("local", 0)


def test_a_version_is_made_of_model_and_dimension_where_none_is_set() -> None:
    assert load().version_label == "bge-m3-latest-1024"
    assert load(EMBEDDING_VERSION="v7").version_label == "v7"
    assert load(EMBEDDING_MODEL="org/model:q4 ü").version_label == "org-model-q4--1024"


@given(
    st.dictionaries(
        st.sampled_from([each.name.upper() for each in fields(Settings)]),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
        max_size=5,
    )
)
def test_any_environment_is_either_settings_or_a_list_of_faults(environ: dict[str, str]) -> None:
    try:
        settings: Any = config.load({**GOOD, **environ})
    except ConfigError as exc:
        found: Any = exc.faults
    else:
        found = settings
    assert isinstance(found, Settings) or all(": " in fault for fault in found)


BY_RQ = {"rq_key_prefix"}
"""RQ reads this one by itself, when it is imported."""


def test_every_setting_is_read_by_the_code() -> None:
    folders = (ROOT / folder for folder in ("app", "worker", "migrations", "deploy"))
    code = "\n".join(
        path.read_text()
        for folder in folders
        for path in folder.rglob("*.py")
        if path != ROOT / "app" / "core" / "config.py"
    )
    own = (ROOT / "app" / "core" / "config.py").read_text()

    for each in fields(Settings):
        readers = re.findall(rf"\bsettings\.{each.name}\b", code)
        readers += re.findall(rf"\bself\.{each.name}\b", own)
        assert readers or each.name in BY_RQ, f"nothing reads {each.name}"


def test_every_setting_says_in_one_sentence_what_it_is() -> None:
    for each in fields(Settings):
        text = each.metadata["text"]
        assert text.endswith("."), each.name
        assert "\n" not in text
        assert "|" not in text
