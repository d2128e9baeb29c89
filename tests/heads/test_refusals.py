"""What conversion of heads refuses, and what it reads and writes at the command line."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as BlockType
from gguf_writing import random_weights, write_gguf
from head_models import KEYS, STORIES, drawn, model_folder, opened, tensors_of
from small_tokenizers import small_source

from jaxinfer.cli import main
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, decide

PLANS: list[tuple[dict[str, Any], str]] = [
    ({}, "one of kv_heads, kv_budget and groups .* got none"),
    ({"kv_heads": 2, "kv_budget": 0.5}, "got kv_heads and kv_budget"),
    ({"kv_heads": 0}, "kv_heads must be 1 or more, got 0"),
    ({"kv_heads": (1, 0)}, "kv_heads must be 1 or more, got 0"),
    ({"kv_heads": True}, "kv_heads must be 1 or more"),
    ({"kv_budget": 0.0}, "kv_budget must be above 0 and at most 1"),
    ({"kv_budget": 1.1}, "kv_budget must be above 0 and at most 1"),
    ({"kv_heads": 1, "method": "average"}, "method must be one of mean, first.*got 'average'"),
    ({"kv_heads": 1, "grouping": "odd"}, "grouping must be one of neighbours, alike, got 'odd'"),
    ({"kv_heads": 1, "measure": "x"}, "measure must be one of weights, text"),
    ({"kv_heads": 1, "seed": 3}, "seed 3 is of method 'random' alone"),
    ({"kv_heads": 1, "method": "random", "seed": -1}, "seed -1 must be"),
    ({"kv_heads": 1, "measure": "weights", "calibration": Path("x")}, "calibration .* would not be read"),
    (
        {"kv_heads": 1, "measure": "weights", "calibration_tokens": 9},
        "calibration_tokens 9 would not be read",
    ),
    ({"kv_heads": 1, "calibration_tokens": 1}, "calibration_tokens 1 must be 2 or more"),
    ({"kv_heads": 8, "method": "repeat", "calibration_tokens": 9}, "calibration_tokens 9 would not be read"),
    ({"kv_budget": 0.5, "method": "repeat"}, "kv_budget 0.5 means nothing to method 'repeat'"),
    ({"kv_heads": 8, "method": "repeat", "measure": "text"}, "measure 'text' means nothing"),
    ({"kv_heads": 1, "method": "similarity", "grouping": "neighbours"}, "'similarity' chooses the groups"),
    ({"kv_budget": 0.5, "measure": "weights"}, "measure 'weights' cannot spread a kv_budget"),
    ({"groups": (((0,),),), "grouping": "alike"}, "groups are stated"),
    ({"groups": ()}, r"groups must be tuples of old heads .* got \(\)"),
    ({"groups": ((0, 1), (2, 3))}, r"groups must be tuples .* got \(\(0, 1\), \(2, 3\)\)"),
    ({"groups": (((0, -1),),)}, "groups must hold heads, numbers from 0 on; got -1"),
    ({"groups": (((0, True),),)}, "groups must hold heads, numbers from 0 on; got True"),
]

MODELS: list[tuple[dict[str, Any], str]] = [
    ({"kv_heads": 3}, "kv_heads 3 does not divide the 4 KV heads of layer 0; allowed: 1, 2, 4, or any"),
    ({"kv_heads": (4, 4, 4, 4, 3)}, "kv_heads 3 does not divide the 4 KV heads of layer 4"),
    ({"kv_heads": 8}, "kv_heads 8 is more than the 4 of layer 0; method 'repeat' makes more"),
    ({"kv_heads": (1, 2)}, "kv_heads has 2 entries for the model's 5 layers"),
    ({"kv_heads": 2, "method": "repeat"}, "kv_heads 2 is not a repetition of 4 KV heads.*4 to 8"),
    ({"kv_heads": 16, "method": "repeat"}, "kv_heads 16 is no multiple.*divides its 8 query heads"),
    ({"kv_heads": 16, "method": "repeat", "unequal_groups": True}, "kv_heads 16 is not a repetition"),
    ({"kv_heads": 6, "method": "repeat"}, "kv_heads 6 is no multiple of the 4 KV heads of layer 0"),
    ({"kv_budget": 0.2}, "kv_budget 0.2 of 20 KV heads is 4, and each of 5 layers needs one; at least 0.250"),
    ({"groups": (((0, 1), (2,)),) * 5}, r"groups of layer 0: got \(\(0, 1\), \(2,\)\).*0 to 3 belongs"),
    ({"groups": (((0, 1, 2, 3), ()),) * 5}, "no group is empty"),
    ({"groups": (((0, 1, 2, 3),),) * 2}, "groups has 2 entries for the model's 5 layers; give 5 or 1"),
    ({"groups": (((0, 1), (2, 4)),)}, r"groups of layer 0: got .* KV heads 0 to 3"),
    ({"kv_heads": 1, "calibration": Path("nowhere.txt")}, r"calibration nowhere\.txt: cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "message"), PLANS, ids=lambda x: str(x)[:40])
def test_plans_that_contradict_are_refused_by_name(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HeadPlan(**plan)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("plan", "message"), MODELS, ids=lambda x: str(x)[:40])
def test_heads_that_cannot_be_are_refused(tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        convert(STORIES, tmp_path / "new", heads=HeadPlan(**plan), progress=False)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_a_text_needs(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(STORIES, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"the model has no tokenizer.*measure 'weights'"):
        decide(opened(bare), HeadPlan(kv_heads=1, method="align"))
    decide(opened(bare), HeadPlan(kv_heads=1, method="align", measure="weights"))
    short = tmp_path / "short.txt"
    short.write_text("")
    with pytest.raises(ConfigError, match=r"calibration no text in .*short\.txt"):
        decide(opened(STORIES), HeadPlan(kv_heads=1, calibration=short))
    short.write_text("a")
    with pytest.raises(ConfigError, match=r"short\.txt: got 1 tokens; at least 2"):
        decide(opened(STORIES), HeadPlan(kv_heads=1, calibration=short))
    short.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"short\.txt: byte 0 is not valid UTF-8"):
        decide(opened(STORIES), HeadPlan(kv_heads=1, calibration=short))


def test_the_text_and_the_seed_that_are_given_are_used(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat and the dog " * 30)
    source = opened(STORIES)

    def first_values(**plan: Any) -> np.ndarray:
        return decide(source, HeadPlan(kv_heads=1, **plan), progress=False).layers[0].values[0].encode

    lines = tmp_path / "texts.jsonl"
    lines.write_text(json.dumps({"text": text.read_text(), "title": "animals"}) + "\n")
    own, other = first_values(method="align"), first_values(method="align", calibration=text)
    assert np.abs(own - other).max() > 1e-3
    np.testing.assert_array_equal(other, first_values(method="align", calibration=lines))
    assert np.abs(own - first_values(method="align", calibration_tokens=50)).max() > 1e-3
    assert np.abs(own - first_values(method="align", measure="weights")).max() > 1e-3
    np.testing.assert_array_equal(own, first_values(method="align"))
    kept = {seed: [int(np.argmax(first_values(method="random", seed=seed)[:, 0, 0]))] for seed in range(12)}
    assert {which for each in kept.values() for which in each} > {0, 1}
    np.testing.assert_array_equal(
        first_values(method="random", seed=5), first_values(method="random", seed=5)
    )


def test_a_quantised_gguf_is_what_its_folder_is(tmp_path: Path) -> None:
    text = small_source()
    assert text.token_types is not None
    fields = {
        "tokenizer.ggml.model": text.model, "tokenizer.ggml.pre": text.pre,
        "tokenizer.ggml.merges": list(text.merges),
        "tokenizer.ggml.token_type": text.token_types.tolist(),
        "tokenizer.ggml.eos_token_id": text.eos_token_ids[0],
    }  # fmt: skip
    gguf = write_gguf(
        tmp_path / "tiny.gguf", random_weights(vocab=len(text.tokens)), block_type=BlockType.Q8_0,
        fields=fields, tokens=list(text.tokens),
    )  # fmt: skip
    plain = convert(gguf, tmp_path / "plain", to="safetensors")
    plan = HeadPlan(kv_heads=1, method="svd", measure="weights")
    one = convert(gguf, tmp_path / "one", to="safetensors", heads=plan)
    other = convert(plain, tmp_path / "other", heads=plan)
    assert opened(one).config["num_key_value_heads"] == 1
    assert opened(one).config == opened(other).config
    tensors = tensors_of(opened(other))
    for name, tensor in tensors_of(opened(one)).items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, tensors[name])


def test_types_are_kept_or_cast(tmp_path: Path) -> None:
    half = convert(STORIES, tmp_path / "half", dtype="bfloat16")
    plan = HeadPlan(kv_heads=1)
    kept = opened(convert(half, tmp_path / "kept", heads=plan))
    name = "model.layers.0.self_attn.v_proj.weight"
    assert kept.dtype(name).name == "bfloat16"
    wide = opened(convert(half, tmp_path / "wide", heads=plan, dtype="float32"))
    mean = opened(half).read(name).astype(np.float32).reshape(4, 8, 64).mean(axis=0)
    np.testing.assert_allclose(wide.read(name), mean, rtol=1e-6, atol=1e-8)  # not rounded on its way
    np.testing.assert_array_equal(kept.read(name), wide.read(name).astype("bfloat16"))


def test_host_memory_stays_near_the_largest_tensors(tmp_path: Path) -> None:
    keys = KEYS | {"num_hidden_layers": 24, "hidden_size": 256, "vocab_size": 512}
    folder = model_folder(tmp_path / "model", keys, drawn(keys))
    source = opened(folder)
    whole = sum(np.prod(source.shape(name)) * 4 for name in source.names())
    tracemalloc.start()
    try:
        convert(folder, tmp_path / "new", to="safetensors", heads=HeadPlan(kv_heads=2), progress=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < whole / 3, f"{peak} of {whole}"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "convert",
        str(STORIES),
        str(tmp_path / "new"),
        "--kv-heads",
        "4,2,2,1,1",
        "--method",
        "align",
    ]
    assert main([*arguments, "--calibration-tokens", "100", "--to", "safetensors"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "KV heads      4 -> 4,2,2,1,1 (20 -> 10 in 5 layers), method align"
    assert out[1] == "KV memory     640 -> 320 bytes a token in bfloat16 (50.0%)"
    assert any("attention" in line for line in out)
    assert out[-1] == str(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["num_key_value_heads"] == [4, 2, 2, 1, 1]
    assert main(["convert", str(tmp_path / "new"), str(tmp_path / "mqa"), "--kv-heads", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "KV heads      4,2,2,1,1 -> 1 (10 -> 5 in 5 layers), method mean"
    assert opened(tmp_path / "mqa").config["num_key_value_heads"] == 1
    for wrong, status, told in (
        (["--method", "mean"], 2, "--method needs --kv-heads, --kv-budget or --groups"),
        (["--kv-heads", "two"], 2, "--kv-heads is a number, or one for each layer"),
        (["--kv-heads", "3"], 1, "kv_heads 3 does not divide the 4 KV heads"),
        (["--kv-heads", "2", "--head-seed", "1"], 1, "seed 1 is of method 'random' alone"),
    ):
        assert main(["convert", str(STORIES), str(tmp_path / "no"), *wrong]) == status
        assert told in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("method", ["mean", "svd"])
def test_the_real_model_as_mqa_has_a_perplexity(tmp_path: Path, smollm2_path: Path, method: Any) -> None:
    from jaxinfer import LLM
    from jaxinfer.heads.calibration_text import TEXT

    convert(smollm2_path, tmp_path / "mqa", heads=HeadPlan(kv_heads=1, method=method), progress=False)
    with LLM(
        str(tmp_path / "mqa"), max_model_len=512, max_num_seqs=1, warmup="lazy", num_pages=40, page_size=16
    ) as llm:
        score = llm.score([TEXT[:1200]])[0]
    assert np.isfinite(score.perplexity)
    assert 5 < score.perplexity < 1e6
