import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from rq import Worker
from rq.registry import FailedJobRegistry
from rq.results import Result
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from app.core.bells import TASK, BellJob, BellQueue
from app.core.link import Link, connect
from app.core.model import EMBEDDINGS
from tests.fakes import Fake, Reply
from tests.processes import StartApi, StartProcess, wait_for

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1200,800",
]
ATTACK = """<img src=x onerror="document.body.textContent='broken in'">"""


@dataclass(frozen=True, slots=True)
class Person:
    """A browser, and somebody in front of it."""

    driver: Chrome
    url: str
    pictures: Path

    def go(self, path: str) -> None:
        self.driver.get(self.url + path)

    def find(self, selector: str) -> WebElement:
        """Return the first element that can be seen, once there is one."""
        return wait_for(lambda: self._seen(selector), 20)[0]

    def read(self, selector: str, wanted: str) -> str:
        """Return what an element says, once it says what is wanted."""
        return wait_for(lambda: [text for text in self._texts(selector) if wanted in text], 20)[0]

    def _seen(self, selector: str) -> list[WebElement]:
        try:
            found = self.driver.find_elements(By.CSS_SELECTOR, selector)
            return [element for element in found if element.is_displayed()]
        except StaleElementReferenceException:  # these pages draw themselves again all the time
            return []

    def _texts(self, selector: str) -> list[str]:
        try:
            return [element.text for element in self._seen(selector)]
        except StaleElementReferenceException:
            return []

    def sign_in(self, key: str) -> None:
        self.go("/rq/")
        self.find("#key").send_keys(key)
        self.find("main button").click()
        self.find("#navbar-dashboard")

    def photograph(self, name: str) -> None:
        self.driver.save_screenshot(str(self.pictures / f"{name}.png"))

    def complaints(self) -> list[str]:
        """Return what the browser refused to do."""
        log: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [each["message"] for each in log if "Content Security Policy" in each["message"]]


@pytest.fixture(scope="module")
def driver(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def key(start_process: StartProcess) -> str:
    made = start_process("worker", "keys", "create", "--client", "ops", "--scopes", "admin")
    assert made.wait() == 0, made.said
    return made.said.strip()


@pytest.fixture
def person(driver: Chrome, start_api: StartApi, key: str, tmp_path: Path) -> Iterator[Person]:
    person = Person(driver, start_api(), tmp_path)
    person.sign_in(key)
    yield person
    driver.delete_all_cookies()


@pytest.fixture
def api(person: Person, key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=person.url, headers=headers, trust_env=False) as api:
        yield api


@pytest.fixture
def start_worker(start_process: StartProcess, fake: Fake) -> Callable[[], None]:
    def start() -> None:
        start_process("worker", "run", EMBEDDINGS, EMBEDDER_URL=fake.url, QUEUE_WAIT_TIME="1")

    return start


@pytest.fixture
def rows(database_url: str) -> None:
    """Write the rows that vectors are for."""
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO ai_insights (id, body) VALUES (1, 'one'), (2, 'two')")


def submit(api: httpx.Client, *texts: str) -> str:
    batch = [
        {"target_table": "ai_insights", "target_id": number, "text": text}
        for number, text in enumerate(texts, 1)
    ]
    answer = api.post("/api/embeddings", json={"items": batch})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


def wait_until(api: httpx.Client, job_id: str, state: str) -> dict[str, Any]:
    def job() -> dict[str, Any] | None:
        found: dict[str, Any] = api.get(f"/api/job/{job_id}").json()
        return found if found["state"] == state else None

    found = wait_for(job, 30)
    assert found
    return found


@pytest.mark.usefixtures("rows")
def test_a_failed_bell_is_seen_and_its_button_makes_the_item_done(
    person: Person, api: httpx.Client, fake: Fake, start_worker: Callable[[], None]
) -> None:
    fake.when(Reply(status=400, error="the input length exceeds the context length"), marker="long")
    start_worker()
    job_id = submit(api, "a short text", "a long text")
    wait_until(api, job_id, "completed_with_errors")

    person.find("#queues td.failed a").click()
    row = person.read("tr[data-role=job]", job_id)
    assert "1 of 2 items failed" in row
    person.photograph("failed")
    person.find("tr[data-role=job] .job_id a").click()
    assert person.find("#requeue-job-btn").text == "Requeue"
    person.driver.back()
    fake.rules.clear()
    person.find("a[data-role=requeue-job-btn]").click()

    job = wait_until(api, job_id, "completed")
    assert (job["counts"]["done"], job["counts"]["failed"]) == (2, 0)
    assert person.read("#jobs tbody", "No jobs.")
    person.photograph("requeued")
    assert person.complaints() == []


def test_a_worker_is_seen_at_work(
    person: Person, api: httpx.Client, fake: Fake, start_worker: Callable[[], None]
) -> None:
    gate = threading.Event()
    fake.when(Reply(until=gate))
    start_worker()
    job_id = submit(api, "a text")

    person.go("/rq/0/view/workers")
    row = person.read("tr[data-role=worker]", job_id)
    person.photograph("workers")
    gate.set()

    assert f"{TASK}('{job_id}', 1)" in row
    assert EMBEDDINGS in row
    wait_until(api, job_id, "completed")
    person.read("tr[data-role=worker]", "idle")
    assert person.complaints() == []


def attack(link: Link, bell: str) -> None:
    """Write markup wherever whoever can write to Redis can write it."""
    queue = BellQueue(EMBEDDINGS, connection=link, serializer="json")
    name = bell.rpartition("-")[0]
    job = queue.enqueue(TASK, name, 1, job_id=bell, job_timeout=60, description=ATTACK)
    FailedJobRegistry(queue=queue, job_class=BellJob).add(job, ttl=600, exc_string=ATTACK)
    Result.create_failure(job, 600, ATTACK)
    link.hset(job.key, mapping={"origin": ATTACK, "meta": json.dumps({"note": ATTACK})})
    link.sadd("rq:queues", f"rq:queue:{ATTACK}")
    worker = Worker([queue], connection=link, serializer="json", job_class=BellJob)
    worker.name = ATTACK
    worker.register_birth()  # type: ignore[no-untyped-call]
    worker.prepare_execution(job)
    link.hset(worker.key, mapping={"version": ATTACK, "queues": f"{EMBEDDINGS},{ATTACK}"})
    other = queue.enqueue(TASK, ATTACK, 1, job_id=f"{bell}1", job_timeout=60, description="bell")
    FailedJobRegistry(queue=queue, job_class=BellJob).add(other, ttl=600, exc_string="")


def test_what_a_stranger_wrote_to_redis_is_shown_as_text(person: Person, redis_url: str) -> None:
    bell = "emb-0123456789abcdef-1"
    with connect(redis_url) as link:
        attack(link, bell)

    person.go("/rq/")
    person.read("#queues tr", ATTACK)
    person.go("/rq/0/view/jobs/embeddings/failed/8/asc/1")
    listed = person.read("tr[data-role=job]", bell)
    person.photograph("attacked-list")
    person.go(f"/rq/0/view/job/{bell}")
    job = person.read("#job-data", "Exception Info")
    person.photograph("attacked-job")
    person.go(f"/rq/0/view/job/{bell}1")
    refused = person.read("#job-data", "Exception Info")
    person.go("/rq/0/view/workers")
    worker = person.read("tr[data-role=worker]", ATTACK)
    person.photograph("attacked-workers")

    assert listed.count(ATTACK) == 2  # description and error
    assert job.count(ATTACK) == 3  # the queue too
    assert "note" not in job
    assert ATTACK not in refused
    assert worker.count(ATTACK) == 2  # name and queue
    assert person.driver.find_elements(By.CSS_SELECTOR, "img") == []
    assert person.complaints() == []


def test_a_person_signs_in_and_out(person: Person) -> None:
    person.find("footer button").click()
    person.find("#key").send_keys("hf_wrong_key")
    person.photograph("login")
    person.find("main button").click()
    person.read("[role=alert]", "not valid")
    person.photograph("login-refused")

    person.go("/rq/0/view/workers")

    person.find("#key")
    assert person.complaints() == []
