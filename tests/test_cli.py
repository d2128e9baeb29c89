"""The command line: what goes to stdout and stderr, and with which status it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest

from jaxinfer import cli, progress
from jaxinfer.cli import terminal
from jaxinfer.cli.flags import EngineFlags, SamplingFlags
from jaxinfer.core import Limits, RequestError, SamplingParams
from jaxinfer.llm import LLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
HELLO = "Hallo Wörld"
LIMITS = Limits(
    num_pages=100,
    page_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=80,
    vocab_size=259,
    eos_token_ids=frozenset({257}),
)


def fake_llm(**options) -> LLM:
    """Answers `hi` with HELLO, and knows a few conversations."""
    from fake_runner import FakeRunner

    from jaxinfer.text.chat import ChatTemplate
    from jaxinfer.text.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{{ 'bot: ' if add_generation_prompt }}"
    )
    said = {
        f"user: hi\nassistant: {HELLO}\nuser: more\nbot: ": "More!",
        "system: s\nuser: hi\nbot: ": "As told",
        "user: hi\nbot: ": HELLO,
        "hi": HELLO,
    }
    scripts = {tuple(p.encode()): (*answer.encode(), 257) for p, answer in said.items()}
    runner = FakeRunner(LIMITS, scripts=scripts, **options)
    return LLM.from_parts(runner, LIMITS, tokenizer=tokenizer, chat_template=template, model_name="fake")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command in this process with a fake model; gives status, stdout and stderr."""

    def run(*arguments: str, stdin: str = "", **options) -> tuple[int, str, str]:
        monkeypatch.setattr(EngineFlags, "load", lambda self, model: fake_llm(**options))
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            status = cli.main(arguments)
        except SystemExit as exit_:
            status = exit_.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err  # pyright: ignore[reportReturnType]

    return run


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxinfer", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def one_line(err: str) -> str:
    assert err.startswith("jaxinfer: error: ")
    assert err.count("\n") == 1, err
    return err


# ------------------------------------------------------------------------------------------ generate


def test_one_prompt_streams_its_text_and_nothing_else(run):
    assert run("generate", "m", "hi") == (0, HELLO + "\n", "")


def test_json_is_one_object_per_prompt_and_line(run):
    status, out, err = run(
        "generate", "m", "hi", "hi there", "--json", "--logprobs", "2", "--max-tokens", "20"
    )
    assert (status, err) == (0, "")
    first, second = [json.loads(line) for line in out.splitlines()]
    assert first["prompt"] == "hi"
    assert first["prompt_token_ids"] == [104, 105]
    assert set(first) == {"prompt", "prompt_token_ids", "outputs", "metrics"}
    assert set(first["metrics"]) == {"ttft_s", "tpot_s", "cached_tokens"}
    output = first["outputs"][0]
    assert set(output) == {"text", "token_ids", "finish_reason", "logprobs", "cumulative_logprob"}
    assert (output["text"], output["finish_reason"]) == (HELLO, "stop")
    assert len(output["logprobs"]) == len(output["token_ids"]) == len(HELLO.encode()) + 1
    assert set(output["logprobs"][0][str(ord("H"))]) == {"logprob", "rank", "text"}
    assert second["prompt"] == "hi there"


def test_json_has_the_logprobs_of_the_prompt_when_asked_for(run):
    status, out, _ = run("generate", "m", "hi!", "--json", "--prompt-logprobs", "1", "--max-tokens", "2")
    assert status == 0
    first, *others = json.loads(out)["prompt_logprobs"]
    assert first is None
    assert [next(iter(known)) for known in others] == [str(ord("i")), str(ord("!"))]
    assert set(others[0][str(ord("i"))]) == {"logprob", "rank", "text"}


def test_several_prompts_and_answers_are_set_apart(run):
    status, out, _ = run("generate", "m", "hi", "--n", "2")
    assert (status, out) == (0, f"{HELLO}\n{'-' * 40}\n{HELLO}\n")


def test_prompts_may_be_token_ids(run):
    assert run("generate", "m", "104,105", "--token-ids")[:2] == (0, HELLO + "\n")
    assert json.loads(run("generate", "m", "104 105", "--token-ids", "--json")[1])["prompt"] is None


def test_shards_have_one_default():
    from checkpoints.writing import DEFAULT_SHARD_BYTES
    from jaxinfer.cli.convert import Convert

    assert Convert("a", "b").max_shard_gb * 1e9 == DEFAULT_SHARD_BYTES


def test_a_model_without_tokenizer_answers_in_ids(run, monkeypatch: pytest.MonkeyPatch):
    real = LLM.from_parts
    monkeypatch.setattr(
        LLM,
        "from_parts",
        lambda *parts, **rest: real(*parts, **{**rest, "tokenizer": None, "chat_template": None}),
    )
    ids = ",".join(map(str, (*HELLO.encode(), 257)))
    assert run("generate", "m", "104,105", "--token-ids")[:2] == (0, ids + "\n")
    assert run("generate", "m", "104,105", "104,105", "--token-ids")[1].split() == [ids, "-" * 40, ids]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "m", ""], "empty"),
        (["generate", "m", "x" * 80], "80"),
        (["generate", "m", "hi", "x" * 80], "80"),
        (["generate", "m", "300", "--token-ids"], "300"),
        (["generate", "m", "-1", "--token-ids"], "-1"),
        (["generate", "m", "a,b", "--token-ids"], "504,3575,314"),
        (["generate", "m", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "m", "hi", "--top-p", "2"], "top_p"),
        (["generate", "m", "hi", "--max-tokens", "0"], "max_tokens"),
        (["generate", "m", "hi", "--max-tokens", "1000"], "1000"),
        (["generate", "m", "hi", "--stop", ""], "stop"),
        (["generate", "m", "bad \udc80 bytes"], "UTF-8"),
        (["chat", "m", "--n", "2"], "n must be 1"),
        (["chat", "m", "--logprobs", "2"], "generate --json"),
        (["generate", "m", "hi", "--logit-bias", "5=1"], "504:-100"),
        (["generate", "m", "hi", "--logit-bias", "5:1", "--logit-bias", "5:2"], "twice"),
        (["generate", "m", "hi", "--logit-bias", "5:nan"], "logit_bias"),
        (["generate", "m", "hi", "--logit-bias", "259:1"], "259"),
        (["generate", "m", "hi", "--repetition-penalty", "0"], "repetition_penalty"),
        (["generate", "m", "hi", "--json-schema", "@/no/such/file"], "/no/such/file"),
        (["generate", "m", "hi", "--regex", "a", "--choice", "b"], "exclude each other"),
        (["generate", "m", "hi", "--regex", "bad \udc80 bytes"], "UTF-8"),
    ],
)
def test_bad_input_is_one_line_and_status_1(run, arguments: list[str], told: str):
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert told in one_line(err)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["generate"],
        ["generate", "m"],
        ["generate", "m", "hi", "--max-tokens", "many"],
        ["generate", "m", "hi", "--warp", "9"],
        ["generate", "m", "hi", "--dtype", "float8"],
        ["generate", "m", "hi", "--logprobs", "2"],
        ["generate", "m", "hi", "--prompt-logprobs", "2"],
        ["score", "m"],
    ],
)
def test_a_wrong_command_line_is_status_2(run, arguments: list[str]):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err


def test_a_failed_prompt_is_told_and_the_others_are_answered(run):
    status, out, err = run("generate", "m", "hi", "~", "--json", nan_tokens={ord("~")})
    assert status == 1
    assert [json.loads(line)["outputs"][0]["finish_reason"] for line in out.splitlines()] == ["stop", "error"]
    one_line(err)
    status, out, err = run("generate", "m", "~", nan_tokens={ord("~")})
    assert (status, out) == (1, "\n")
    one_line(err)


def test_an_error_of_ours_is_named_and_shown_only_when_asked(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(EngineFlags, "load", lambda self, model: 1 / 0)
    assert cli.main(["generate", "m", "hi"]) == 1
    assert "unexpected ZeroDivisionError" in one_line(capsys.readouterr().err)
    monkeypatch.setenv("JAXINFER_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate", "m", "hi"])


def test_sampling_flags_are_the_sampling_params():
    flags, params = ({f.name: f.default for f in fields(kind)} for kind in (SamplingFlags, SamplingParams))
    assert set(flags) == set(params)
    assert SamplingFlags().given() == {}  # what is left out is the model's own
    given = {
        "n": 2, "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
        "seed": 0, "stop": ("x",), "stop_token_ids": (3,), "include_stop_str_in_output": True,
        "ignore_eos": True, "logprobs": 0, "skip_special_tokens": False, "repetition_penalty": 1.1,
        "presence_penalty": 0.0, "frequency_penalty": -1.0, "prompt_logprobs": 0, "bad_words": ("x",),
        "allowed_token_ids": (5, 6),
    }  # fmt: skip
    assert SamplingFlags(**given).given() == given
    assert SamplingFlags(logprob_token_ids=(5, 6)).given() == {"logprob_token_ids": (5, 6)}
    assert SamplingFlags(logit_bias=("5:-100", "6:2.5")).given() == {"logit_bias": {5: -100.0, 6: 2.5}}
    structures = {
        "json_schema": '{"type": "object"}',
        "regex": "a+",
        "choice": ("a", "b"),
        "grammar": "start: A",
    }
    for name, value in structures.items():
        assert SamplingFlags(**{name: value}).given() == {name: value}
    tags = {"structured_outputs": '{"json": {"type": "object"}}'}
    assert SamplingFlags(**tags).given() == {"structured_outputs": {"json": {"type": "object"}}}
    with pytest.raises(RequestError, match="not JSON"):
        SamplingFlags(structured_outputs="{").given()
    assert set(given) | {"logit_bias", "logprob_token_ids"} | set(structures) | set(tags) == set(flags)


def test_schemas_and_grammars_may_be_files(tmp_path: Path):
    schema, damaged = tmp_path / "schema.json", tmp_path / "damaged"
    schema.write_text('{"type": "object"}')
    damaged.write_bytes(b"a\xff")
    for name in ("json_schema", "grammar"):
        assert SamplingFlags(**{name: f"@{schema}"}).given() == {name: '{"type": "object"}'}
        with pytest.raises(RequestError, match=f"{name}: .*byte 1 is not valid UTF-8"):
            SamplingFlags(**{name: f"@{damaged}"}).given()


def test_flags_that_are_left_out_are_the_models_own(run, monkeypatch: pytest.MonkeyPatch):
    own = SamplingParams(temperature=0.3, top_k=7, max_tokens=4)
    seen: list[SamplingParams] = []
    real = LLM.prepare

    def prepare(self, prompt, sampling_params=None):
        self.default_sampling = own
        seen.append(real(self, prompt, sampling_params).sampling)
        return real(self, prompt, sampling_params)

    monkeypatch.setattr(LLM, "prepare", prepare)
    assert run("generate", "m", "hi")[:2] == (0, HELLO[:4] + "\n")
    assert run("generate", "m", "hi", "--max-tokens", "5", "--top-k", "0")[:2] == (0, HELLO[:5] + "\n")
    assert seen == [own, SamplingParams(temperature=0.3, top_k=0, max_tokens=5)]


# ---------------------------------------------------------------------------------------------- chat


def test_a_piped_chat_keeps_its_history(run):
    status, out, err = run("chat", "m", stdin="hi\n\nmore\n/clear\nhi\n")
    assert (status, out, err) == (0, f"{HELLO}\nMore!\n{HELLO}\n", "")
    status, out, _ = run("chat", "m", "--system", "s", stdin="hi\n/exit\nhi\n")
    assert (status, out) == (0, "As told\n")


def test_a_chat_goes_on_after_a_turn_that_is_too_long(run):
    status, out, err = run("chat", "m", stdin="x" * 100 + "\nhi\n")
    assert (status, out) == (1, HELLO + "\n")
    assert "/clear" in one_line(err)


def test_ctrl_c_stops_an_answer_and_not_the_chat(run, monkeypatch: pytest.MonkeyPatch):
    def interrupted(events):
        for number, event in enumerate(events):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    monkeypatch.setattr(terminal, "print_stream", interrupted)
    status, out, err = run("chat", "m", stdin="hi\n")
    assert (status, out, err) == (0, " [stopped]\n", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ------------------------------------------------------------------------------------ as a process


def test_help_is_quick_and_imports_nothing_heavy():
    heavy = {"jax", "numpy", "fastapi", "pydantic", "rich", "checkpoints"}
    code = f"import sys, jaxinfer.cli\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    for command in ("", "pull", "generate", "chat", "serve", "score", "doctor"):
        assert shell(*[command][: bool(command)], "--help").returncode == 0


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path):
    done = shell("generate", "no/such", "hi", JAXINFER_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "jaxinfer pull no/such" in one_line(done.stderr)
    done = shell("generate", "smollm2-135m", "hi", JAXINFER_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "jaxinfer pull smollm2-135m" in one_line(done.stderr)


def test_wrong_options_and_names_are_one_line():
    for arguments, told in (
        (["generate", "random:x", "hi", "--page-size", "3"], "page_size"),
        (["serve", "random:x", "--port", "70000"], "port"),
        (["serve", "random:x", "--max-num-seqs", "0"], "max_num_seqs"),
        (["pull", "not a name"], "not a name"),
    ):
        done = shell(*arguments)
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert told in one_line(done.stderr)


def test_a_port_in_use_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "serve.py", "random:x", "--port", str(port)],
            capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
    assert done.returncode == 1
    assert str(port) in one_line(done.stderr)


def test_doctor_says_what_is_there(tmp_path: Path):
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "model.gguf").touch()
    done = shell("doctor", "--json", JAXINFER_CACHE=str(tmp_path), JAXINFER_API_KEY="secret")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["versions"]["python"].startswith("3.")
    assert report["versions"]["jax"]
    assert report["versions"]["llguidance"]
    assert report["structured_outputs"] == {"llguidance": True}
    assert report["engine_defaults"]["page_size"] == 16
    assert report["engine_defaults"]["enable_prefix_caching"] is True
    assert report["devices"][0]["platform"]
    assert list(report["cache"]["pulled_models"]) == ["smollm2-135m"]
    assert report["import_paths"]["jaxinfer"] == str(ROOT / "jaxinfer")
    assert "secret" not in done.stdout
    done = shell("doctor", JAXINFER_CACHE=str(tmp_path))
    assert done.returncode == 0
    assert "attention backends" in done.stdout
    assert "llguidance: yes" in done.stdout
    assert "page size: 16" in done.stdout
    assert "smollm2-135m" in done.stdout


SERVED = """
import sys, time
sys.path.insert(0, "tests")
import test_cli
from jaxinfer import cli
from jaxinfer.cli.flags import EngineFlags
llm = test_cli.fake_llm()
real = llm.engine.step
llm.engine.step = lambda: (time.sleep(0.05), real())[1]
EngineFlags.load = lambda self, model: llm
flags = ["--port", "0", "--served-model-name", "org/fake", "--drain-seconds", sys.argv[1]]
sys.exit(cli.main(["serve", "m", *flags]))
"""


@pytest.mark.parametrize("drain_seconds", ["20", "0"])
def test_sigterm_drains_and_ends_with_status_0(drain_seconds: str):
    """The answer takes 13 steps of 50 ms; the signal comes while it is being made."""
    command = [sys.executable, "-c", SERVED, drain_seconds]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stderr is not None
        ready = server.stderr.readline()
        url = re.fullmatch(r"jaxinfer: serving org/fake at (http://127\.0\.0\.1:\d+)/v1\n", ready)
        assert url, ready
        answers: list[tuple[int, dict]] = []

        def ask() -> None:
            body = json.dumps({"model": "org/fake", "prompt": "hi"}).encode()
            request = urllib.request.Request(url[1] + "/v1/completions", body)  # pyright: ignore
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    answers.append((answer.status, json.load(answer)))
            except urllib.error.HTTPError as error:
                answers.append((error.code, json.load(error)))

        client = threading.Thread(target=ask)
        client.start()
        while json.load(urllib.request.urlopen(url[1] + "/health", timeout=20))["sequences"] == 0:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        client.join(20)
        out, err = server.communicate(timeout=20)
    finally:
        server.kill()
    (status, answer), *more = answers
    assert not more
    if drain_seconds == "0":
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")
    else:
        assert (status, answer["choices"][0]["text"]) == (200, HELLO)
    assert server.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["generate", "m", "hi"], ["chat", "m"]])
def test_programs_compiled_before_the_text_are_shown_and_later_ones_are_not(
    run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
):
    from fake_runner import FakeRunner

    real = FakeRunner.dispatch

    def compiling(self, plan):
        with progress.phase("compiling"):
            return real(self, plan)

    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(FakeRunner, "dispatch", compiling)
    status, out, err = run(*arguments, stdin="hi\n")
    assert (status, out) == (0, HELLO + "\n")
    # Two: the second step is started before the first one tells.
    assert err.count("compiling: done") == err.count("\n") == 2
    assert progress._silenced == 0
