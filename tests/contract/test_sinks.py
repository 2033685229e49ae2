"""What every follower has to keep, on each store that can be had; and OpenSearch's own answers."""

import shutil
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from app.adapters.sinks.opensearch import OpenSearch, id_of
from app.core.errors import BackendFault, ErrorClass, SinkFault
from app.core.model import Target
from app.core.ports import Document, FollowerSink, SinkOptions, find
from tests.conftest import free_port
from tests.fakes import float32, vector_of
from tests.processes import Running, wait_for
from tests.search import Scripted, Search

DIMENSION = 8
TARGET = Target(
    target_table="notes",
    embedding_version="v1",
    table_schema="public",
    table_name="notes",
    id_column="id",
    id_type="text",
    vector_column="embedding",
    dimension=DIMENSION,
    model="m",
)
SHELF = Path(__file__).parent.parent.parent / "app" / "adapters" / "sinks"
FOLLOWERS = {path.stem for path in SHELF.glob("[a-z]*.py")} - {"pgvector"}


def options(url: str = "", **more: str) -> SinkOptions:
    values = {"path": "", "prefix": "holdfast", "mapping": "knn_vector", **more}
    return SinkOptions(url=url, seconds=10.0, **values)


def document(target_id: str, version: int = 1, text: str | None = None) -> Document:
    text = f"text of {target_id}" if text is None else text
    return Document(
        target_id=target_id,
        version=version,
        content_hash=f"{version:064x}",
        model="m",
        model_digest="sha256:0",
        text=text,
        metadata={"page": 1, "of": ["a", {"b": None}]},
        vector=vector_of("m", text, DIMENSION),
    )


def gone(target_id: str, version: int) -> Document:
    return replace(document(target_id, version), text=None, metadata=None, vector=None)


@pytest.fixture
def search() -> Iterator[Search]:
    with Search() as search:
        yield search


@pytest.fixture
def noida(tmp_path: Path) -> Iterator[str]:
    """Give an independent server of the same protocol, in Elasticsearch's dialect."""
    package = find_spec("noida_db")
    if package is None or package.origin is None:
        pytest.skip("noida-db is not installed")
    binary = Path(package.origin).parent / "noida-db"  # its script would leave this behind
    port = free_port()
    arguments = ["start", "--only", "elasticsearch", "--elasticsearch-port", str(port)]
    arguments += ["--host", "127.0.0.1", "--data-dir", str(tmp_path / "noida")]
    log = tmp_path / "noida.log"
    with log.open("wb") as output:
        server = Running(
            subprocess.Popen([str(binary), *arguments], stdout=output, stderr=output), log
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, 30)
        yield url
    finally:
        server.stop()
        shutil.rmtree(tmp_path / "noida", ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Place:
    """A follower's name, and the store that it is made on."""

    name: str
    options: SinkOptions

    def open(self) -> FollowerSink:
        """Make the sink, as one process does."""
        made: FollowerSink = find("sinks", self.name)(self.options)
        return made


@pytest.fixture(params=["opensearch", "opensearch on noida-db", "lancedb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Give each follower of the shelf, on each store that can be had here."""
    name = request.param.split()[0]
    if request.param == "opensearch":
        return Place(name, options(request.getfixturevalue("search").url))
    if name == "opensearch":
        return Place(name, options(request.getfixturevalue("noida"), mapping="dense_vector"))
    pytest.importorskip("lancedb")
    return Place(name, options(path=str(tmp_path / "lance")))


@pytest.fixture
def sink(place: Place) -> Iterator[FollowerSink]:
    made = place.open()
    yield made
    made.close()


def test_every_follower_of_the_shelf_is_tested_here() -> None:
    assert sorted(FOLLOWERS) == ["lancedb", "opensearch"]


def held(sink: FollowerSink, target: Target = TARGET) -> dict[str, int]:
    return {each.target_id: each.version for each in sink.held(target)}


def test_what_was_written_is_held_and_read_back(sink: FollowerSink) -> None:
    written = [document(str(number)) for number in range(25)]

    assert sink.write(TARGET, written) == {}

    assert {each.target_id: each for each in sink.held(TARGET)}.keys() == {
        each.target_id for each in written
    }
    assert {each.content_hash for each in sink.held(TARGET)} == {f"{1:064x}"}
    assert {each.dimension for each in sink.held(TARGET)} <= {0, DIMENSION}
    found = sink.read(TARGET, ["3", "24", "none"])
    assert set(found) == {"3", "24"}
    read = found["24"]
    assert float32(read.vector or ()) == written[24].vector
    assert (read.text, read.metadata) == (written[24].text, written[24].metadata)
    assert (read.version, read.content_hash) == (1, f"{1:064x}")


def test_the_same_once_more_changes_nothing(sink: FollowerSink) -> None:
    for _ in range(3):
        assert sink.write(TARGET, [document("1"), document("2")]) == {}

    assert held(sink) == {"1": 1, "2": 1}


def test_the_greatest_version_wins_whatever_the_order(sink: FollowerSink) -> None:
    sink.write(TARGET, [document("1", 5, "newer")])

    assert sink.write(TARGET, [document("1", 3, "older"), document("2", 3)]) == {}

    assert held(sink) == {"1": 5, "2": 3}
    assert sink.read(TARGET, ["1"])["1"].text == "newer"
    sink.write(TARGET, [document("1", 9, "newest")])
    assert sink.read(TARGET, ["1"])["1"].text == "newest"


def test_what_is_deleted_is_gone_until_it_comes_newer(sink: FollowerSink) -> None:
    sink.write(TARGET, [document("1", 1), document("2", 1)])

    assert sink.write(TARGET, [gone("1", 4), gone("none", 4)]) == {}

    assert held(sink) == {"2": 1}
    assert sink.read(TARGET, ["1"]) == {}
    sink.write(TARGET, [document("1", 6)])
    assert held(sink) == {"1": 6, "2": 1}


def test_what_is_deleted_does_not_come_back_with_an_older_write(
    place: Place, sink: FollowerSink
) -> None:
    if place.options.mapping == "dense_vector":
        pytest.skip("noida-db keeps no tombstones")
    sink.write(TARGET, [document("1", 1), document("2", 1)])
    sink.write(TARGET, [gone("1", 4)])

    assert sink.write(TARGET, [document("1", 3)]) == {}

    assert held(sink) == {"2": 1}


def test_a_deletion_that_comes_late_takes_nothing_newer(sink: FollowerSink) -> None:
    sink.write(TARGET, [document("1", 5)])

    assert sink.write(TARGET, [gone("1", 4)]) == {}

    assert held(sink) == {"1": 5}


def test_ids_that_differ_by_case_or_spaces_only_are_different(sink: FollowerSink) -> None:
    ids = ["a", "A", " a", "a ", "a  b", "a b", "ä", "'; --", "x" * 512, "日" * 500]

    assert sink.write(TARGET, [document(each) for each in ids]) == {}

    assert held(sink) == dict.fromkeys(ids, 1)
    assert set(sink.read(TARGET, ids)) == set(ids)


def test_each_target_and_version_has_a_place_of_its_own(sink: FollowerSink) -> None:
    others = [
        replace(TARGET, embedding_version="v2"),
        replace(TARGET, target_table="Notes"),
        replace(TARGET, target_table="no.tes"),
        replace(TARGET, embedding_version="big", dimension=12),
    ]
    sink.write(TARGET, [document("1")])
    for number, each in enumerate(others, 2):
        vector = vector_of("m", "t", each.dimension)
        assert sink.write(each, [replace(document("1", number), vector=vector)]) == {}

    assert held(sink) == {"1": 1}
    assert [held(sink, each) for each in others] == [{"1": n} for n in (2, 3, 4, 5)]
    sink.drop(others[0])
    sink.drop(others[0])
    assert held(sink, others[0]) == {}
    assert held(sink) == {"1": 1}


def test_a_version_is_made_current_again_and_again(sink: FollowerSink) -> None:
    other = replace(TARGET, embedding_version="v2")
    for target in (TARGET, other, other, TARGET):
        sink.make_current(target)
        assert sink.write(target, [document("1")]) == {}


def test_a_vector_of_another_dimension_is_refused_alone(sink: FollowerSink) -> None:
    wrong = replace(document("2"), vector=[1.0] * (DIMENSION + 1))

    faults = sink.write(TARGET, [document("1"), wrong, document("3")])

    assert list(faults) == ["2"]
    assert isinstance(faults["2"], SinkFault)
    assert held(sink) == {"1": 1, "3": 1}


def test_a_place_of_another_dimension_is_named_with_both_numbers(
    place: Place, sink: FollowerSink
) -> None:
    sink.write(TARGET, [document("1")])
    other = replace(TARGET, dimension=12)
    vector = vector_of("m", "t", 12)
    again = place.open()

    with pytest.raises(BackendFault, match=r"8 dimensions.* 12"):
        again.write(other, [replace(document("2"), vector=vector)])

    assert held(again) == {"1": 1}
    again.close()


def test_a_text_of_three_megabytes_is_taken(sink: FollowerSink) -> None:
    text = "The oven was cold. " * 160_000

    assert sink.write(TARGET, [document("1", text=text), document("2")]) == {}

    assert sink.read(TARGET, ["1"])["1"].text == text


def test_what_holds_nothing_says_so(sink: FollowerSink) -> None:
    assert held(sink) == {}
    assert sink.read(TARGET, ["1"]) == {}
    sink.drop(TARGET)


# ---- OpenSearch's own answers (V26 to V28 and the table of what they mean)


@pytest.fixture
def opensearch(search: Search) -> Iterator[OpenSearch]:
    made = OpenSearch(replace(options(search.url), seconds=0.5))
    yield made
    made.close()


def test_the_index_has_its_mapping_and_an_alias_to_read_by(
    search: Search, opensearch: OpenSearch
) -> None:
    opensearch.write(TARGET, [document("1")])
    opensearch.make_current(TARGET)

    [(name, index)] = search.indexes.items()
    assert name == opensearch.index_of(TARGET)
    assert index.vector["type"] == "knn_vector"
    assert index.vector["dimension"] == DIMENSION
    assert index.settings == {"knn": True, "gc_deletes": "1h"}
    assert opensearch.alias_of(TARGET) in index.aliases
    other = replace(TARGET, embedding_version="v2")
    opensearch.make_current(other)
    holders = [
        name for name, each in search.indexes.items() if opensearch.alias_of(TARGET) in each.aliases
    ]
    assert holders == [opensearch.index_of(other)]


def test_v26_of_ten_one_is_refused_and_two_come_again_alone(
    search: Search, opensearch: OpenSearch
) -> None:
    refusal = (400, "mapper_parsing_exception", "failed to parse: 'my secret text'")
    search.item_faults["3"] = deque([refusal])
    for busy in ("5", "6"):
        search.item_faults[busy] = deque([(429, "es_rejected_execution_exception", "full")])

    faults = opensearch.write(TARGET, [document(str(number)) for number in range(10)])

    assert {name: type(fault) for name, fault in faults.items()} == {
        "3": SinkFault,
        "5": BackendFault,
        "6": BackendFault,
    }
    assert faults["3"].message == "400 mapper_parsing_exception"
    assert len(search.documents()) == 7


def test_v27_an_index_that_vanished_is_made_with_its_mapping_and_not_by_a_write(
    search: Search, opensearch: OpenSearch
) -> None:
    opensearch.write(TARGET, [document("1")])
    search.indexes.clear()

    assert opensearch.write(TARGET, [document(str(number)) for number in range(5)]) == {}

    [index] = search.indexes.values()
    assert index.vector["type"] == "knn_vector"
    assert len(index.documents) == 5


def test_an_index_that_a_write_made_is_named_and_not_filled(
    search: Search, opensearch: OpenSearch
) -> None:
    httpx.post(
        f"{search.url}/{opensearch.index_of(TARGET)}/_bulk",
        content=b'{"index":{"_id":"9","version":1}}\n{"embedding":[1.0]}\n',
        trust_env=False,
    )

    with pytest.raises(BackendFault, match="as float, not as knn_vector") as caught:
        opensearch.write(TARGET, [document("1")])

    assert caught.value.error_class is ErrorClass.BAD_CONFIG


def test_v28_what_was_applied_and_not_answered_is_the_same_when_it_comes_again(
    search: Search, opensearch: OpenSearch
) -> None:
    documents = [document(str(number)) for number in range(10)]
    opensearch.write(TARGET, [])
    search.once(Scripted(applied=True, is_silent=True))
    with pytest.raises(BackendFault) as caught:
        opensearch.write(TARGET, documents)
    assert caught.value.error_class is ErrorClass.SLOW

    assert opensearch.write(TARGET, documents) == {}

    assert len(search.documents()) == 10
    assert set(search.writes.values()) == {1}


def test_too_large_a_request_is_halved_and_the_smaller_size_remembered(
    search: Search, opensearch: OpenSearch
) -> None:
    search.max_bytes = 20_000
    documents = [document(str(number), text="x" * 2_000) for number in range(40)]

    assert opensearch.write(TARGET, documents) == {}
    assert len(search.documents()) == 40

    alone = document("alone", text="x" * 30_000)
    faults = opensearch.write(TARGET, [alone, document("beside")])
    assert list(faults) == ["alone"]
    assert isinstance(faults["alone"], SinkFault)


@pytest.mark.parametrize(
    ("scripted", "error_class"),
    [
        (Scripted(503), ErrorClass.BUSY),
        (Scripted(429, headers={"Retry-After": "7"}), ErrorClass.BUSY),
        (Scripted(502), ErrorClass.UNREACHABLE),
        (Scripted(500), ErrorClass.UNCLEAR),
        (Scripted(401), ErrorClass.BAD_CONFIG),
        (Scripted(200, {"took": 1}), ErrorClass.BAD_ANSWER),
        (Scripted(200, {"items": [{}]}), ErrorClass.BAD_ANSWER),
    ],
)
def test_a_whole_request_that_fails_charges_nobody(
    search: Search, opensearch: OpenSearch, scripted: Scripted, error_class: ErrorClass
) -> None:
    search.once(scripted)

    try:
        faults = opensearch.write(TARGET, [document("1")])
        [fault] = faults.values()
    except BackendFault as exc:
        fault = exc

    assert isinstance(fault, BackendFault)
    assert fault.error_class is error_class
    if scripted.headers:
        assert fault.retry_after_seconds == 7


def test_a_request_of_ours_that_is_malformed_is_said_and_not_sent_again(
    search: Search, opensearch: OpenSearch
) -> None:
    search.once(Scripted(400, {"error": {"type": "illegal_argument_exception"}}))

    faults = opensearch.write(TARGET, [document("1"), document("2")])

    assert [fault.error_class for fault in faults.values()] == [ErrorClass.INTERNAL] * 2


def test_a_store_that_is_away_is_unreachable(search: Search, opensearch: OpenSearch) -> None:
    with search.refused(), pytest.raises(BackendFault) as caught:
        opensearch.write(TARGET, [document("1")])

    assert caught.value.error_class is ErrorClass.UNREACHABLE


def test_documents_that_are_nobodys_are_told(search: Search, opensearch: OpenSearch) -> None:
    opensearch.write(TARGET, [document("1")])
    search.indexes[opensearch.index_of(TARGET)].documents["stranger"] = (7, {"some": "thing"})

    assert held(opensearch) == {"1": 1, "stranger": 0}


def test_no_id_is_too_long_for_the_store() -> None:
    assert id_of("x" * 512) == "x" * 512
    assert id_of("日" * 200).startswith("sha256:")
    assert id_of("日" * 200) != id_of("日" * 201)
