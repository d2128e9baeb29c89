"""/metrics: what it says, of whom, and that the dashboard and the alert rules ask for nothing else."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from fake_runner import FakeRunner
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from scripted import eventually
from test_server_openai_sdk import LIMITS, fake_llm

from jaxinfer.core import Limits
from jaxinfer.engine.metrics import FIRST_TOKEN_BOUNDS, Histograms
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.server.metrics import HISTOGRAMS, Metrics, Shares
from jaxinfer.text.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
STORIES = ROOT / "tests" / "golden" / "stories260k"

Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


def scrape(client: TestClient, **headers: str) -> Samples:
    """Every sample by its name, as Prometheus' own parser reads them."""
    answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parse(answer.text)


def parse(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            assert not math.isnan(sample.value), sample
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample of that name with these labels, `jaxinfer_` left out."""
    all_of_it = samples[f"jaxinfer_{name}"]
    found = [number for own, number in all_of_it if labels.items() <= own.items()]
    assert len(found) == 1, f"{name} {labels}: {all_of_it}"
    return found[0]


@pytest.fixture
def client() -> Generator[TestClient]:
    with TestClient(create_app(fake_llm()), raise_server_exceptions=False) as client:
        yield client


def complete(client: TestClient, **body: Any) -> Any:
    return client.post(
        "/v1/completions", json={"prompt": "other", "max_tokens": 5, "ignore_eos": True, **body}
    )


# --------------------------------------------------------------------------------------------- what it says


def test_a_request_is_in_every_count(client: TestClient):
    assert complete(client, n=2).status_code == 200
    got = scrape(client)
    assert value(got, "prompt_tokens_total") == 5
    assert value(got, "generation_tokens_total") == 10
    assert value(got, "request_success_total", finished_reason="length") == 2
    assert value(got, "request_success_total", finished_reason="error") == 0
    assert 5 <= value(got, "steps_total") <= 8
    assert value(got, "failed_steps_total") == 0
    assert value(got, "inter_token_latency_seconds_count") == 2 * 4, "a gap, not a request"
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert value(got, f"{name}_seconds_count") == 2, name
    assert value(got, "request_prompt_tokens_sum") == 10
    assert value(got, "request_generation_tokens_bucket", le="5.0") == 2
    assert value(got, "request_generation_tokens_bucket", le="2.0") == 0
    assert value(got, "prefix_cache_queries_total") > 0
    assert value(got, "num_requests_running") == value(got, "num_requests_waiting") == 0
    assert value(got, "kv_cache_usage_perc") == 0
    pages = {labels["state"]: number for labels, number in got["jaxinfer_kv_cache_pages"]}
    assert pages.keys() == {"live", "cached", "free"}
    assert sum(pages.values()) == LIMITS.usable_pages
    assert value(got, "engine_healthy") == 1
    assert value(got, "max_open_sequences") == LIMITS.max_num_seqs + 256
    assert {part["part"] for part, _ in got["jaxinfer_host_seconds_total"]} == {"engine", "dispatch", "wait"}
    assert value(got, "host_seconds_total", part="engine") > 0
    assert all(
        labels["model_name"] == "fake"
        for name, of_name in got.items()
        if name.startswith("jaxinfer_")
        for labels, _ in of_name
    )
    assert "jaxinfer_mbu" not in got, "nobody measured this machine"


def test_histograms_are_whole_and_have_the_known_bounds(client: TestClient):
    complete(client)
    got = scrape(client)
    bounds = [float(labels["le"]) for labels, _ in got["jaxinfer_time_to_first_token_seconds_bucket"]]
    assert bounds == [*FIRST_TOKEN_BOUNDS, float("inf")]
    assert set(HISTOGRAMS) == set(Histograms.__slots__)
    for name in HISTOGRAMS:
        full = f"jaxinfer_{name}{'' if name.endswith('tokens') else '_seconds'}"
        counts = [number for _, number in got[f"{full}_bucket"]]
        assert counts == sorted(counts), name
        assert counts[-1] == value(got, full.removeprefix("jaxinfer_") + "_count") == 1 or "inter" in name
        assert value(got, full.removeprefix("jaxinfer_") + "_sum") >= 0


def test_counters_only_grow_and_gauges_stay_above_zero():
    with TestClient(create_app(fake_llm())) as client:
        before = scrape(client)
        for index in range(6):
            complete(client, prompt="x" * (index + 1), n=1 + index % 2)
            after = scrape(client)
            for name, samples in after.items():
                old = {tuple(sorted(labels.items())): number for labels, number in before.get(name, [])}
                for labels, number in samples:
                    assert number >= 0, (name, labels)
                    if name.endswith(("_total", "_bucket", "_count")) and not name.startswith("process"):
                        assert number >= old.get(tuple(sorted(labels.items())), 0), (name, labels)
            before = after


def test_requests_are_counted_by_route_and_status_with_few_labels(client: TestClient):
    complete(client)
    complete(client, temperature=-1)
    complete(client, model="another")
    client.get("/v1/models/whatever")
    client.get("/v1/models/something-else")
    for index in range(20):
        client.get(f"/scan/{index}")
    client.request("BREW", "/health")
    got = scrape(client)["jaxinfer_http_requests_total"]
    counts = {(own["method"], own["route"], own["status"]): number for own, number in got}
    assert counts == {
        ("POST", "/v1/completions", "200"): 1,
        ("POST", "/v1/completions", "400"): 1,
        ("POST", "/v1/completions", "404"): 1,
        ("GET", "/v1/models/{name:path}", "404"): 2,
        ("GET", "other", "404"): 20,
        ("other", "/health", "405"): 1,
    }


def test_a_fault_of_ours_counts_as_500():
    llm = fake_llm()
    llm.prepare = None  # type: ignore[method-assign,assignment]
    with TestClient(create_app(llm), raise_server_exceptions=False) as client:
        assert complete(client).status_code == 500
        got = scrape(client)
    assert value(got, "http_requests_total", route="/v1/completions", status="500") == 1


def test_refusals_are_counted_while_the_engine_is_in_a_step():
    """A scrape waits for no step: here one that does not end before the scrape."""
    gate, held = threading.Event(), threading.Event()

    class Slow(FakeRunner):
        def fetch(self, pending: Any) -> Any:
            held.set()
            assert gate.wait(20)
            return super().fetch(pending)

    small = Limits(
        num_pages=50,
        page_size=8,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=256,
        vocab_size=259,
    )
    llm = LLM.from_parts(Slow(small), small, tokenizer=ByteTokenizer(), model_name="fake")
    app = create_app(llm, max_queue=1)
    with TestClient(app) as client:
        threads = [threading.Thread(target=complete, args=(client,)) for _ in range(2)]
        try:
            for thread in threads:
                thread.start()
                assert held.wait(10)
            assert eventually(lambda: app.state.worker.health()["sequences"] == 2)
            assert complete(client).status_code == 429
            time.sleep(0.01)
            got = scrape(client)
        finally:
            gate.set()
            for thread in threads:
                thread.join(10)
        end = scrape(client)
    assert value(got, "num_requests_running") == 1
    assert 0 < value(got, "kv_cache_usage_perc") <= 1
    assert value(got, "open_sequences") == value(got, "max_open_sequences") == 2
    assert value(got, "step_in_progress_seconds") > 0
    assert value(got, "http_requests_total", status="429") == 1
    assert value(end, "http_requests_total", status="200", route="/v1/completions") == 2
    assert value(end, "num_requests_running") == value(end, "open_sequences") == 0


def test_a_dead_engine_can_still_be_asked():
    llm = fake_llm()

    def broken() -> Any:
        raise RuntimeError("off the bus")

    llm.engine.step = broken  # type: ignore[method-assign]
    with TestClient(create_app(llm), raise_server_exceptions=False) as client:
        assert complete(client).status_code >= 500
        got = scrape(client)
    assert value(got, "engine_healthy") == 0
    assert value(got, "prompt_tokens_total") == 5


def test_two_applications_do_not_meet():
    before = {family.name for family in REGISTRY.collect()}
    named = 'a "model"\n'
    with (
        TestClient(create_app(fake_llm(), served_model_name=named)) as one,
        TestClient(create_app(fake_llm())) as two,
    ):
        complete(one)
        assert value(scrape(one), "generation_tokens_total", model_name=named) == 5
        assert value(scrape(two), "generation_tokens_total", model_name="fake") == 0
    assert {family.name for family in REGISTRY.collect()} == before, "the global registry is not ours"


def test_the_key_is_wanted_for_metrics_too():
    with TestClient(create_app(fake_llm(), api_key="secret")) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"authorization": "Bearer guess"}).status_code == 401
        got = scrape(client, authorization="Bearer secret")
    assert value(got, "http_requests_total", route="/metrics", status="401") == 2


def test_pages_of_two_moments_still_make_up_the_pool():
    """What a scrape reads amid a step: a page that was free, then cached, is seen as both."""

    class Torn:
        histograms = Histograms(10)

        def stats(self) -> dict[str, Any]:
            return {
                **fake_llm().engine.stats(),
                "pages_total": 10,
                "pages_free": 8,
                "pages_cached": 5,
                "pages_live": -3,
            }

    class Well:
        def health(self) -> dict[str, Any]:
            return {"status": "ok", "sequences": 0, "capacity": 4, "step_s": None}

    got = parse(bytes(Metrics(Torn(), Well(), "m").handle().body).decode())
    pages = {labels["state"]: number for labels, number in got["jaxinfer_kv_cache_pages"]}
    assert pages == {"free": 8, "cached": 2, "live": 0}
    assert value(got, "kv_cache_usage_perc") == 0


def test_shares_are_of_the_last_while():
    now = 50.0
    shares = Shares(lambda: now)
    assert shares.rates(0, 0) == (0, 0)
    for now, count, rate in (
        (54.0, 40.0, 10.0),  # since the start
        (69.0, 40.0, 0.0),  # since 15 s before
        (70.0, 80.0, 40 / 16),  # a second scraper, close behind: not over one second
        (71.0, 80.0, 40 / 17),
        (80.0, 180.0, 100 / 10),  # since 70
        (80.0, 180.0, 100 / 10),
    ):
        assert shares.rates(count, 2 * count) == (pytest.approx(rate), pytest.approx(2 * rate)), now
    for tick in range(10_000):
        now = 81.0 + tick / 10
        shares.rates(200, 400)
    assert len(shares._readings) < 15, "memory stays bounded, however often it is asked"


# ------------------------------------------------------------------------------ the dashboard and the rules


@pytest.fixture(scope="module")
def real() -> Samples:
    """What a server with a real model exports, after requests that went well and not so well."""
    llm = LLM(str(STORIES), progress=False, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    llm.measure_machine()
    with TestClient(create_app(llm)) as client:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={**body, "max_tokens": -1}).status_code == 400
        return scrape(client)


def test_a_real_step_has_its_share_of_the_roofline(real: Samples):
    bandwidth = value(real, "machine_bandwidth_bytes_per_second")
    assert bandwidth > 1e8
    moved, operations = value(real, "moved_bytes_total"), value(real, "operations_total")
    steps = value(real, "steps_total")
    assert 4 * 200_000 * steps < moved < 4 * 400_000 * steps, "some 260 000 float32 weights a step"
    assert operations > 2 * 200_000 * 12
    assert 0 < value(real, "mbu") < 1
    assert 0 < value(real, "mfu") < 1
    assert value(real, "step_tokens_total") < value(real, "step_slots_total")
    assert 0 < value(real, "padding_waste_ratio") < 1
    assert value(real, "compiles_total") >= 2
    assert value(real, "compiles_after_warmup_total") == 0
    assert value(real, "parameter_bytes") > 4 * 200_000


def dashboard_queries() -> list[tuple[str, str]]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def alert_queries() -> list[tuple[str, str]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


QUERIES = [*dashboard_queries(), *alert_queries()]
FROM_PROMETHEUS = {"job", "instance"}
"""Labels that the scrape adds."""
OF_STATUS = {"429": "Too Many Requests"}
"""Label values that a healthy server does not show; the test of refusals has seen it."""


def nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if (child := getattr(tree, name, None)) is not None and not isinstance(child, str):
            yield from nodes(child)
    for child in getattr(tree, "args", None) or ():
        yield from nodes(child)


def unknown(expression: str, exported: Samples) -> list[str]:
    """What a query asks for that is not there."""
    for variable, stands_for in (("$__rate_interval", "1m"), ("$model", ".*"), ("$instance", ".*")):
        expression = expression.replace(variable, stands_for)
    tree, wrong, labels_of_all = promql.parse(expression), [], set(FROM_PROMETHEUS)
    for node in nodes(tree):
        if not isinstance(node, promql.VectorSelector):
            continue
        if node.name == "up":
            continue
        samples = exported.get(node.name or "")
        if not samples:
            wrong.append(f"no metric {node.name}")
            continue
        known = FROM_PROMETHEUS | {label for labels, _ in samples for label in labels}
        labels_of_all |= known
        for matcher in node.matchers.matchers:
            if matcher.name not in known:
                wrong.append(f"{node.name} has no label {matcher.name}")
            elif matcher.op == promql.MatchOp.Equal and matcher.name not in FROM_PROMETHEUS:
                values = {labels.get(matcher.name) for labels, _ in samples}
                if matcher.value not in values and matcher.value not in OF_STATUS:
                    wrong.append(f"{node.name} has no {matcher.name} {matcher.value!r}: {values}")
    for node in nodes(tree):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            missing = set(node.modifier.labels) - labels_of_all
            wrong += [f"grouped by {label}, which nothing has" for label in sorted(missing)]
    return wrong


@pytest.mark.parametrize(
    ("name", "expression"), QUERIES, ids=[f"{i}-{n}" for i, (n, _) in enumerate(QUERIES)]
)
def test_every_query_asks_for_what_is_there(name: str, expression: str, real: Samples):
    assert not unknown(expression, real)
    assert re.search(r"jaxinfer_|process_|up\{", expression), "and for something"


@pytest.mark.parametrize(
    "planted",
    [
        "rate(jaxinfer_steps[5m])",
        'sum by (reason) (jaxinfer_request_success_total{finished_reason="stop"})',
        'jaxinfer_request_success_total{finished_reason="stopped"}',
        'jaxinfer_kv_cache_pages{kind="live"}',
        "1 - jaxinfer_steps_total / vllm_steps_total",
        "histogram_quantile(0.5, sum by (le) (rate(jaxinfer_e2e_request_latency_bucket[5m])))",
    ],
)
def test_a_planted_fault_is_seen(planted: str, real: Samples):
    assert unknown(planted, real)


def test_every_metric_is_in_the_readme_and_the_readme_says_no_more(real: Samples):
    table = (MONITORING / "README.md").read_text().split("## What there is")[1].split("## Share")[0]
    listed = set(re.findall(r"`([a-z0-9_]+)`(?=[,` |])", table.split("|---|---|---|")[1].split("\n\n")[0]))
    listed -= {label for samples in real.values() for labels, _ in samples for label in labels}
    exported = {
        re.sub(r"_(bucket|sum|count)$", "", name).removeprefix("jaxinfer_")
        for name in real
        if name.startswith("jaxinfer_")
    }
    assert listed == exported


def test_the_dashboard_is_one_that_grafana_takes():
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
        if panel["type"] != "row":
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert panel["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables == {"datasource", "model", "instance"}


def test_prometheus_finds_the_rules_and_the_job_that_they_name():
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert [(MONITORING / name).is_file() for name in config["rule_files"]] == [True]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    named = {job for _, query in QUERIES for job in re.findall(r'job="([^"]+)"', query)}
    assert named == jobs == {"jaxinfer"}
    for rule in (
        r for g in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for r in g["rules"]
    ):
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
