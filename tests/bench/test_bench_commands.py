"""`jaxinfer bench` as it is typed: the last line is JSON, the table is before it, flags go together or are
refused."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner
from served_answers import LIMITS
from serving import serving

from jaxinfer import cli
from jaxinfer.bench import read_log, workbench
from jaxinfer.cli.flags import EngineFlags
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.text.tokenizer import ByteTokenizer

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
SMALL = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--page-size", "8", "--num-pages", "64")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command in this process: status, lines of stdout, stderr. The model is a fake one, unless
    `real`."""

    def run(*arguments: str, real: bool = False) -> tuple[int, list[str], str]:
        if not real:
            monkeypatch.setattr(
                EngineFlags,
                "load",
                lambda self, model: LLM.from_parts(FakeRunner(LIMITS), LIMITS, model_name=model),
            )
        capsys.readouterr()
        try:
            status = cli.main(("bench", *arguments))
        except SystemExit as exit_:
            status = exit_.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out.splitlines(), err  # pyright: ignore[reportReturnType]

    return run


def checked(lines: list[str]) -> dict[str, Any]:
    """The JSON of the last line, with what every report has."""
    report = json.loads(lines[-1])
    assert set(report["versions"]) >= {"jax", "jaxlib", "flax", "python"}
    assert {"benchmark", "model", "target", "device", "revision", "engine", "predicted_by"} <= set(report)
    for result in report.get("runs", [report]):
        assert "seed" in result["load"]
        for name in ("ttft_s", "tpot_s", "gap_s", "e2e_s"):
            assert {"p50", "p95", "p99"} <= set(result["measured"][name])
        assert {"mbu", "mfu", "padding_waste", "prefix_hit_rate"} <= set(result["measured"])
        assert "predicted" in result
    assert len(lines) > 3
    return report


def test_throughput(run, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    status, lines, _ = run(
        "throughput", "m", "--requests", "20", "--prompt", "uniform:5-30", "--output", "8", "--log", str(log),
        "--seed", "3",
    )  # fmt: skip
    assert status == 0
    report = checked(lines)
    assert (report["benchmark"], report["model"], report["load"]["seed"]) == ("throughput", "m", 3)
    assert (report["measured"]["requests"], report["measured"]["output_tokens"]) == (20, 160)
    (records,) = read_log(log)  # the warm-up is not in it
    assert len(records) == 20
    assert report["measured"]["ttft_s"]["max"] == max(record.ttft_s for record in records)


def test_latency(run, tmp_path: Path) -> None:
    plot, log = tmp_path / "latency.png", tmp_path / "log"
    status, lines, err = run(
        "latency", "m", "--batches", "1", "4", "--prompt", "10", "--output", "5", "--repeats", "3",
        "--plot", str(plot), "--log", str(log),
    )  # fmt: skip
    assert status == 0
    report = checked(lines)
    assert [result["batch"] for result in report["runs"]] == [1, 4]
    assert [result["measured"]["requests"] for result in report["runs"]] == [3, 12]
    assert [len(records) for records in read_log(log)] == [3, 12]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "batch 4:" in err


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (("--rate", "300", "--requests", "12"), "poisson"),
        (("--rate", "300", "--burstiness", "0.5", "--requests", "12"), "gamma"),
        (("--rate", "300", "--arrivals", "constant", "--duration", "0.04"), "constant"),
        (("--concurrency", "3", "--requests", "12"), "closed"),
    ],
)
def test_serve(run, tmp_path: Path, way: tuple[str, ...], kind: str) -> None:
    plot = tmp_path / "serve.png"
    status, lines, _ = run(
        "serve", "m", *way, "--prompt", "10", "--output", "4", "--shared-prefix", "16",
        "--slo", "ttft_p95=10s,gap_p99=10s", "--plot", str(plot),
    )  # fmt: skip
    assert status == 0
    report = checked(lines)
    assert (report["load"]["kind"], report["load"]["requests"]) == (kind, 12)
    assert report["measured"]["slo"] == {"terms": "ttft_p95=10s,gap_p99=10s", "holds": True, "broken": []}
    assert report["measured"]["goodput_requests_per_s"] == report["measured"]["requests_per_s"]
    # The first ones arrive before the prefix is in the cache.
    assert 0 < report["measured"]["prefix_hit_tokens"] <= 16 * 11
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert any("holds" in line for line in lines[:-1])


def test_serve_takes_a_trace(run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"at_s": {i / 50}, "prompt_tokens": 9, "output_tokens": {i + 1}}}\n' for i in range(5))
    )
    status, lines, _ = run("serve", "m", "--trace", str(trace), "--speed", "4")
    assert status == 0
    report = checked(lines)
    assert report["load"]["kind"] == "trace"
    assert report["measured"]["output_tokens"] == 15


def test_sweep(run, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    status, lines, err = run(
        "sweep", "m", "--slo", "ttft_p95=30s", "--prompt", "8", "--output", "3", "--duration", "0.05",
        "--least-requests", "10", "--high", "400", "--plot", str(plot),
    )  # fmt: skip
    assert status == 0
    report = checked(lines)
    assert report["knee"]["kind"] == "above"
    assert report["capacity_requests_per_s"] > 0
    assert "holds at the highest load tried, 400 requests/s" in lines[-2]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "400 requests/s: the SLO holds" in err


def test_context(run, tmp_path: Path) -> None:
    plot = tmp_path / "context.png"
    status, lines, _ = run("context", "m", "--output", "4", "--repeats", "2", "--plot", str(plot))
    assert status == 0
    report = checked(lines)
    assert [result["context"] for result in report["runs"]] == [LIMITS.max_model_len - 4]
    assert report["runs"][0]["peak_bytes"] > 0
    status, lines, _ = run("context", "m", "--output", "4", "--contexts", "16", "64")
    assert [result["context"] for result in checked(lines)["runs"]] == [16, 64]


def test_context_warms_up_every_length(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that was not run yet may compile, and its only repeat would be that."""
    ran: list[tuple[str, int]] = []
    warm_up, measure = workbench.run_warm_up, workbench.Workbench.measure_repeated

    def warmed(target: Any, load: Any, advance: Any) -> Any:
        ran.append(("warm-up", load.arrivals[0].num_prompt))
        return warm_up(target, load, advance)

    def measured(bench: Any, loads: Any, title: str) -> Any:
        ran.append(("measured", loads[0].arrivals[0].num_prompt))
        return measure(bench, loads, title)

    monkeypatch.setattr(workbench, "run_warm_up", warmed)
    monkeypatch.setattr(workbench.Workbench, "measure_repeated", measured)
    status, _, _ = run("context", "m", "--output", "4", "--contexts", "16", "64", "--repeats", "1")
    assert status == 0
    assert ran == [("warm-up", 16), ("measured", 16), ("warm-up", 64), ("measured", 64)]


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("serve", "--rate", "1"), 2, "give a MODEL to be run here, or --url"),
        (("serve", "m", "--rate", "1", "--url", "http://127.0.0.1:9"), 1, "no server answers"),
        (("serve", "--url", "http://x", "--rate", "1", "--device", "h200"), 2, "--device is of an engine"),
        (("serve", "m", "--rate", "1", "--device", "h200"), 2, "--device is of a server"),
        (("serve", "m"), 2, "--rate, --concurrency and --trace"),
        (("serve", "m", "--rate", "1", "--concurrency", "2"), 2, "--rate, --concurrency and --trace"),
        (("serve", "m", "--rate", "1", "--requests", "2", "--duration", "3"), 2, "not both"),
        (("serve", "m", "--rate", "1", "--duration", "0"), 2, "--duration must be above 0"),
        (("serve", "m", "--rate", "0"), 1, "rate must be at least 1e-6"),
        (("serve", "m", "--rate", "1e-5", "--duration", "1"), 2, "no request comes in --duration 1"),
        (("serve", "m", "--rate", "1", "--requests", "0"), 1, "a load has from 1"),
        (("serve", "--url", "http://x", "--rate", "1", "--timeout-s", "0"), 1, "timeout_s must be"),
        (("serve", "--url", "http://x", "--rate", "1", "--timeout-s", "nan"), 1, "timeout_s must be"),
        (("serve", "--url", "http://x", "--rate", "1", "--vocab-size", "0"), 1, "vocab_size must be"),
        (("serve", "m", "--concurrency", "1", "--burstiness", "2"), 2, "--burstiness is of an open loop"),
        (("serve", "m", "--rate", "1", "--arrivals", "constant", "--burstiness", "2"), 2, "Poisson"),
        (("serve", "m", "--rate", "1", "--speed", "2"), 2, "--speed is of a trace"),
        (("serve", "m", "--trace", "x", "--prompt", "5"), 2, "--prompt contradicts --trace"),
        (("serve", "m", "--trace", "/no/such/file"), 1, "/no/such/file"),
        (("serve", "m", "--rate", "1", "--vocab-size", "5"), 2, "--vocab-size is of a server"),
        (("serve", "--url", "http://x", "--rate", "1", "--page-size", "8"), 2, "--page-size is of an engine"),
        (("serve", "--url", "http://127.0.0.1:9", "--rate", "1"), 1, "no server answers"),
        (("serve", "m", "--rate", "1", "--slo", "fast"), 1, "a term of an SLO looks like"),
        (("serve", "m", "--rate", "1", "--prompt", "long"), 1, "a length looks like"),
        (("serve", "m", "--rate", "1", "--plot", "x.pdf"), 1, "writes PNG"),
        (("serve", "m", "--rate", "1", "--plot", "/no/folder/x.png"), 1, "there is no folder"),
        (("serve", "m", "--rate", "1", "--log", "/no/folder/x"), 1, "/no/folder/x"),
        (("serve", "m", "--rate", "1", "--calibration", "/no/file"), 1, "there is no such file"),
        (("serve", "m", "--rate", "1", "--temperature", "-1"), 1, "temperature"),
        (("serve", "m", "--rate", "100", "--prompt", "500"), 1, "no request of the warm-up was answered"),
        (("sweep", "m"), 2, "a sweep needs --slo"),
        (("sweep", "m", "--slo", "ttft_p95=1s", "--low", "5", "--high", "2"), 1, "from a low rate"),
        (("sweep", "m", "--slo", "ttft_p95=1s", "--start", "-5"), 1, "from a low rate"),
        (("sweep", "m", "--slo", "ttft_p95=1s", "--duration", "0"), 1, "a run lasts above 0 seconds"),
        (("latency", "m", "--batches", "0"), 1, "a load has from 1"),
        (("context", "m", "--contexts", "5000"), 1, "must be at least 1 and fit in 128"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(run, arguments: tuple[str, ...], status: int, told: str) -> None:
    got, lines, err = run(*arguments)
    assert got == status, err
    assert lines == []
    errors = [line for line in err.splitlines() if line.startswith("jaxinfer: error: ")]
    assert len(errors) == 1
    assert told in errors[0]


def test_a_plot_without_matplotlib_names_the_extra(run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    status, lines, err = run("throughput", "m", "--plot", "x.png")
    assert (status, lines) == (1, [])
    assert err.count("\n") == 1
    assert "pip install 'jaxinfer[plots]'" in err


def test_a_run_without_an_answer_is_status_1(run) -> None:
    status, lines, _ = run(
        "serve", "m", "--rate", "100", "--requests", "3", "--prompt", "500", "--warmup-requests", "0"
    )
    assert status == 1
    report = checked(lines)
    assert (report["measured"]["ok"], report["measured"]["refused"]) == (0, 3)
    assert report["measured"]["ttft_s"]["p50"] is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return f"random:{path}"


def test_a_real_engine_is_measured_and_foretold(run, tiny: str) -> None:
    """All of it on a tiny model: MBU and MFU of this machine, no compile amid the run, a prediction
    beside."""
    status, lines, _ = run(
        "serve", tiny, "--rate", "50", "--requests", "15", "--prompt", "uniform:5-20", "--output", "6",
        "--slo", "e2e_p99=60s", *SMALL, real=True,
    )  # fmt: skip
    assert status == 0
    report = checked(lines)
    measured, predicted = report["measured"], report["predicted"]
    assert measured["ok"] == predicted["ok"] == 15
    assert measured["compiles_after_warmup"] == 0
    assert 0 < measured["mbu"] < 1
    assert 0 < measured["mfu"] < 1
    assert 0 <= measured["padding_waste"] < 1
    assert predicted["output_tokens"] == measured["output_tokens"] == 90
    assert predicted["ttft_s"]["p95"] > 0
    assert "roofline at" in report["predicted_by"] or "calibration of" in report["predicted_by"]
    assert report["device"]["platform"]
    assert report["engine"]["max_num_batched_tokens"] == 16
    assert any("predicted p50" in line for line in lines)


def test_compiles_amid_a_run_are_told(run, tiny: str) -> None:
    """Lazily, and with no warm-up, the programs are compiled while requests wait for them."""
    status, lines, _ = run(
        "latency", tiny, "--batches", "2", "--prompt", "11", "--output", "3", "--repeats", "1", "--warmup",
        "lazy", "--warmup-requests", "0", "--no-predict", *SMALL, real=True,
    )  # fmt: skip
    assert status == 0
    report = checked(lines)
    assert report["runs"][0]["measured"]["compiles_after_warmup"] > 0
    assert report["runs"][0]["predicted"] is None
    assert any("PROGRAMS AMID THE RUNS" in line for line in lines)


def test_a_server_is_foretold_as_the_model_that_is_named(run) -> None:
    """Its pages and its longest request are what it says itself."""
    llm = LLM.from_parts(FakeRunner(LIMITS), LIMITS, tokenizer=ByteTokenizer(), model_name="fake")
    load = ("--rate", "100", "--requests", "8", "--prompt", "20", "--output", "9", "--vocab-size", "200")
    with serving(create_app(llm)) as url:
        status, lines, _ = run("serve", "llama3-8b", "--url", url, *load, "--device", "h200")
        assert status == 0
        report = checked(lines)
        assert report["measured"]["ok"] == report["predicted"]["ok"] == 8
        assert report["predicted"]["tpot_s"]["p50"] > 0.004  # 16 GB of weights at 4.8 TB/s
        assert "sheet" in report["predicted_by"]
        # An engine of that model would take longer requests; this server takes 128 tokens.
        status, lines, _ = run(
            "serve", "llama3-8b", "--url", url, "--rate", "1", "--requests", "1", "--prompt", "500",
            "--warmup-requests", "0", "--device", "h200",
        )  # fmt: skip
        assert checked(lines)["predicted"]["refused"] == 1
        status, lines, _ = run("serve", "llama3-8b", "--url", url, *load, "--no-predict")
        assert checked(lines)["predicted"] is None


@pytest.mark.slow
def test_a_server_process_is_measured(run, tiny: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
    from served_script import served

    command = ["serve.py", tiny, "--port", "0", "--warmup", "full", *SMALL]
    with served(command, ready_s=300) as server:
        status, lines, _ = run(
            "serve", tiny.removeprefix("random:"), "--url", server.url, "--vocab-size", "512", "--rate", "10",
            "--duration", "11", "--prompt", "uniform:5-20", "--output", "6", "--slo", "e2e_p99=60s", *SMALL,
        )  # fmt: skip
        assert status == 0
        report = checked(lines)
        assert report["measured"]["ok"] == report["predicted"]["ok"] == 110
        assert report["measured"]["compiles_after_warmup"] == 0
        assert 0 < report["measured"]["mbu"] < 1  # the run was longer than the server's window
        assert report["measured"]["output_tokens"] == 660
        status, lines, _ = run(
            "sweep", "--url", server.url, "--vocab-size", "512", "--prompt", "8", "--output", "4", "--slo",
            "ttft_p95=5s", "--duration", "2", "--least-requests", "20", "--low", "2", "--start", "5",
            "--high", "10",
        )  # fmt: skip
        assert status == 0
        assert checked(lines)["knee"]["kind"] == "above"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("throughput", "m", "--requests", "0"), "a load has from 1"),
        (("latency", "m", "--batches", "1", "0"), "a load has from 1"),
        (("latency", "m", "--prompt", "0"), "lengths go from 1"),
        (("latency", "m", "--output", "0"), "lengths go from 1"),
        (("latency", "m", "--repeats", "0"), "repeats must be at least 1"),
        (("context", "m", "--output", "0"), "lengths go from 1"),
        (("context", "m", "--contexts", "-3"), "lengths go from 1"),
        (("sweep", "m", "--slo", "ttft_p95=1s", "--burstiness", "0"), "burstiness must be"),
        (("sweep", "m", "--slo", ","), "a sweep needs --slo"),
    ],
)
def test_wrong_numbers_are_told_before_a_model_is_loaded(
    run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(EngineFlags, "load", load)
    status, _, err = run(*arguments, real=True)
    assert status in (1, 2)
    assert told in err


def test_the_same_command_again_does_not_find_its_prompts_in_the_cache(run) -> None:
    llm = LLM.from_parts(FakeRunner(LIMITS), LIMITS, tokenizer=ByteTokenizer(), model_name="fake")
    load = ("--concurrency", "1", "--requests", "4", "--prompt", "40", "--output", "3", "--vocab-size", "200")
    with serving(create_app(llm)) as url:
        for _ in range(2):
            _, lines, _ = run("serve", "--url", url, *load, "--warmup-requests", "0")
            assert checked(lines)["measured"]["prefix_hit_tokens"] == 0
