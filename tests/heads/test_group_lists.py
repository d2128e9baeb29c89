"""Groups of heads at the command line: as text, as files, for every layer and for each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from head_models import STORIES, opened, tensors_of

from jaxinfer.cli import main
from jaxinfer.cli.group_lists import read_groups
from jaxinfer.cli.terminal import UsageError
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, stated_groups

EACH = (((0, 3), (1, 2)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((3,), (0, 1, 2)))
TEXT = "0,3|1-2; 0-3; 0|1|2|3; 0,1|2,3; 3|0-2"


def test_texts_and_files_say_the_same(tmp_path: Path) -> None:
    assert read_groups(TEXT) == EACH
    assert read_groups("0,1|2-3") == (((0, 1), (2, 3)),)
    lists = [[list(heads) for heads in layer] for layer in EACH]
    for name, text, expected in (
        ("each.json", json.dumps(lists), EACH),
        ("named.json", json.dumps({"groups": lists}), EACH),
        ("all.json", "[[0, 1], [2, 3]]", (((0, 1), (2, 3)),)),
        ("each.toml", f"groups = {lists}", EACH),
        ("all.toml", "groups = [[0, 1], [2, 3]]", (((0, 1), (2, 3)),)),
        ("one.json", "[[0, 1, 2, 3]]", (((0, 1, 2, 3),),)),
    ):
        (tmp_path / name).write_text(text)
        assert read_groups(str(tmp_path / name)) == expected, name


@pytest.mark.parametrize(
    "text", ["", "|", "0,1|", "0;", "3-1", "0,x", "-1", "0:1", "0..3", "[[0,1]]", "0,,1"]
)
def test_what_is_no_list_of_groups_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"--groups: .* names no heads; give groups of heads such as 0,1\|2-3"
    ):
        read_groups(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", "[]", "[0, 1]", "[[[]], []]", "[[[[0]]]]", '[["0"]]', "[[0.5]]", "[[true]]", "[[-1]]",
     "{}", '{"groups": [[0]], "other": 1}', "null", "[" * 100_000],
)  # fmt: skip
def test_files_that_say_something_else_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "groups.json").write_text(text)
    with pytest.raises((UsageError, ConfigError), match="groups") as caught:
        HeadPlan(groups=read_groups(str(tmp_path / "groups.json")))
    assert len(str(caught.value).replace(str(tmp_path), "")) < 400


def test_lists_of_python() -> None:
    assert stated_groups([[0, 1], [2, 3]]) == (((0, 1), (2, 3)),)
    assert stated_groups([[[0, 1]], [[0], [1]]]) == (((0, 1),), ((0,), (1,)))
    with pytest.raises(ConfigError, match="groups must be lists of old heads"):
        stated_groups("0,1")


def test_the_command_does_what_python_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = HeadPlan(groups=EACH)
    by_python = convert(STORIES, tmp_path / "python", to="safetensors", heads=plan, progress=False)
    words = ["convert", str(STORIES), str(tmp_path / "command"), "--to", "safetensors"]
    assert main([*words, "--groups", TEXT]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "KV heads      4 -> 2,1,4,2,2 (20 -> 11 in 5 layers), method mean"
    for name, tensor in tensors_of(opened(by_python)).items():
        np.testing.assert_array_equal(opened(tmp_path / "command").read(name), tensor)
    words[2] = str(tmp_path / "all")
    assert main([*words, "--groups", "0,2|1,3", "--method", "first"]) == 0
    name = "model.layers.4.self_attn.v_proj.weight"
    old = opened(STORIES).read(name).reshape(4, 8, -1)
    np.testing.assert_array_equal(opened(tmp_path / "all").read(name).reshape(2, 8, -1), old[[0, 1]])
    capsys.readouterr()
    words[2] = str(tmp_path / "no")
    for flags, status, message in (
        (
            ["--groups", "0,1|2-4"],
            1,
            "groups of layer 0: got ((0, 1), (2, 3, 4)); each of its KV heads 0 to 3",
        ),
        (["--groups", "0,1|2"], 1, "each of its KV heads 0 to 3 belongs in exactly one group"),
        (["--groups", "0-3;0-3"], 1, "groups has 2 entries for the model's 5 layers; give 5 or 1 for all"),
        (["--groups", "0-3", "--kv-heads", "1"], 1, "got kv_heads and groups"),
        (["--groups", "0-3", "--unequal-groups"], 1, "groups are stated"),
        (["--groups", "0+3"], 2, "--groups: '0+3' of '0+3' names no heads"),
        (["--groups", str(tmp_path / "none.json")], 2, "none.json: cannot be read"),
    ):
        assert main([*words, *flags]) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
