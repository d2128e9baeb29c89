"""Models that learn with their queries seeing no more than a span says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense import dense_logits
from span_masks import mask_of
from tiny import first_layers
from training import STORIES, text_file

import checkpoints
from jaxinfer.cli import main
from jaxinfer.config import attention_span
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan
from jaxinfer.lab.data import Order, pack, token_stream
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.subject import open_subject
from jaxinfer.lab.uptrain import uptrain
from jaxinfer.text.files import read_texts

pytestmark = pytest.mark.usefixtures("compile_cache")
LENGTH = 24


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> Path:
    return first_layers(STORIES, tmp_path_factory.mktemp("models") / "one")


@pytest.mark.parametrize(
    "span", [None, "window:5", "window:4,sinks:3", "longformer:6,global:1", "bigbird:8,global:1,random:1"]
)
def test_the_first_loss_is_that_of_the_reference_under_its_mask(
    shallow: Path, tmp_path: Path, span: str | None
) -> None:
    text = text_file(tmp_path)
    sizes: dict[str, Any] = {"steps": 1, "batch": 2, "sequence_length": LENGTH, "save_every": 0}
    chosen = Settings(**sizes, attention_span=span, page_size=None if span is None else 4)
    report = uptrain(shallow, tmp_path / "trained", [text], chosen, progress=False)
    assert report["attention_span"] == span

    subject = open_subject(str(shallow))
    config, source = subject.config, subject.checkpoint
    stream = token_stream(subject.tokenizer, read_texts([text]), config.vocab_size)
    blocks = pack(stream, LENGTH)
    tokens, _ = blocks.take(Order(len(blocks), chosen.seed).take(0, 2))
    tensors = {name: np.asarray(source.read(name)) for name in source.names()}
    mask = mask_of(None if span is None else attention_span(span, 4), 4, LENGTH)
    losses = []
    for block in np.asarray(tokens):
        logits = dense_logits(config, tensors, block[:-1].tolist(), mask)
        scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses.append(-scores[np.arange(LENGTH), block[1:]])
    assert report["first_loss"] == pytest.approx(float(np.mean(losses)), abs=1e-4)
    # what comes out is a model like any other, and says nothing of the span
    assert checkpoints.open_checkpoint(tmp_path / "trained").config == {
        **checkpoints.open_checkpoint(shallow).config
    }


def test_spans_that_cannot_be_learnt_under_are_refused_by_name(shallow: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"attention_span": "topk-pages:4"}, "attention_span 'topk-pages:4' cannot be learnt under"),
        ({"attention_span": "topk-pages:4,from:0"}, "allowed: window, longformer, bigbird"),
        ({"attention_span": "windows:4"}, "attention_span 'windows:4' is none of"),
        ({"attention_span": "bigbird:24,global:0,random:0"}, "not whole pages of 16"),
        ({"attention_span": "window:4", "page_size": 12}, "page_size must be a power of two, got 12"),
        ({"page_size": 8}, "page_size 8 is of spans: it needs attention_span"),
    ):
        with pytest.raises(ConfigError, match=message):
            Settings(steps=1, **changes)
    text, keys = text_file(tmp_path), checkpoints.open_checkpoint(shallow).config
    convert(shallow, tmp_path / "sliding", to="safetensors", progress=False)
    keys |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (tmp_path / "sliding" / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match="attention_span: the layers of this model have spans of their own"):
        uptrain(tmp_path / "sliding", tmp_path / "no", [text], Settings(steps=1, attention_span="window:4"))
    convert(shallow, tmp_path / "linear", linear_layers="all", progress=False)
    with pytest.raises(ConfigError, match="attention_span: layers 0 have linear attention"):
        uptrain(tmp_path / "linear", tmp_path / "no", [text], Settings(steps=1, attention_span="window:4"))
    assert not (tmp_path / "no").exists()


def test_the_command_and_what_learning_under_the_span_is_good_for(
    shallow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out loss under the window: after learning so it is lower than after learning with everything."""
    text = text_file(tmp_path)
    mqa = convert(shallow, tmp_path / "mqa", heads=HeadPlan(kv_heads=1), to="safetensors", progress=False)
    common = ["--data", str(text), "--batch", "4", "--sequence-length", "32", "--learning-rate", "3e-3",
              "--save-every", "0"]  # fmt: skip
    reports = {}
    for name, flags in (("full", []), ("own", ["--attention-span", "window:3"])):
        words = ["lab", "uptrain", str(mqa), str(tmp_path / name), *common, "--steps", "40", *flags]
        assert main(words) == 0
        # one more step at no rate to speak of, which measures under the window
        words = ["lab", "uptrain", str(tmp_path / name), str(tmp_path / f"{name} measured"), *common]
        words += ["--steps", "1", "--learning-rate", "1e-9", "--attention-span", "window:3"]
        assert main([*words, "--eval-file", str(text)]) == 0
        reports[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert reports["own"]["first_eval_loss"] < reports["full"]["first_eval_loss"] - 0.02, reports
