"""Names of cells by content, and their files: what is torn is not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import recipe

from jaxinfer.core import RequestError
from jaxinfer.lab.compare.cells import Cell, CellFolder, Model, Texts, cells, identity, label
from jaxinfer.lab.compare.recipe import TextPart, parse_recipe

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
RECORD = {"status": "done", "figures": {"perplexity": 3.25, "names": ["a", "ü"]}, "error": None}


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    (tmp_path / "rhyme.txt").write_text("one two three four five six seven eight\n" * 4)
    return Texts(tmp_path, tmp_path / "kept")


def names(texts: Texts, source: str = "s", **changes) -> list[str]:
    found = cells(parse_recipe(recipe(**changes)), source, texts)
    assert len({cell.name for cell in found}) == len(found)
    return [cell.name for cell in found]


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.randoms())
def test_the_order_of_keys_does_not_name_a_cell(value: dict, random) -> None:
    keys = list(value)
    random.shuffle(keys)
    assert identity(value) == identity({key: value[key] for key in keys})
    assert identity(value) != identity({**value, "one more": 1})


def test_names_do_not_change_with_the_program(texts: Texts) -> None:
    """As they were when they were first given: else comparisons that were made would be made again."""
    pinned = ["acd710402ad1dd4b", "c6952059373193b6", "b1bfefe4c8a19e8f", "3cca063cd4bdac46"]
    usual = names(texts, grid__spans=["full", "window:8"])
    assert [*usual[:2], *usual[-2:]] == pinned
    own = names(texts, grid__spans=["full", "window:8"], grid__trained_under=["full", "own"])
    assert set(names(texts, grid__spans=["full", "window:8"])) < set(own)
    other = names(texts, grid__spans=["full", "window:8"], grid__trained_under=["own"])
    assert set(own) > set(other)


def test_what_is_called_otherwise_is_the_same_cell(texts: Texts) -> None:
    usual = names(texts)
    assert names(texts, name="other", variant=[{"name": "one head", "kv_heads": 1}]) == usual
    assert names(texts, grid__methods=[{"method": "mean", "name": "average"}]) == usual


def test_a_recipe_that_grows_keeps_its_cells(texts: Texts) -> None:
    usual = set(names(texts))
    more = {
        "grid__tokens": [0, 64, 128], "grid__seeds": [0, 7], "grid__spans": ["full", "window:8"],
        "grid__methods": ["mean", "align"], "variant": [{"kv_heads": 1}, {"kv_heads": 2}],
    }  # fmt: skip
    for key, value in more.items():
        found = set(names(texts, **{key: value}))
        assert usual < found, key
    assert usual < set(names(texts, **more))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"uptrain__learning_rate": 2e-3}, ["similarity", "original", "converted"]),
        ({"evaluate__window": 16}, ["similarity"]),
        ({"engine__kv_cache_dtype": "int8"}, ["similarity"]),
        ({"calibration__tokens": 64}, ["original", "control", "converted", "uptrained"]),
        ({"grid__methods": ["align"]}, ["similarity", "original", "control"]),
        ({"grid__seeds": [1]}, ["similarity", "original", "converted"]),
    ],
)
def test_what_matters_to_a_cell_renames_it(texts: Texts, changes: dict, kept: list[str]) -> None:
    before, after = (
        {
            cell.model.role if cell.kind == "quality" else cell.kind: cell.name
            for cell in cells(parse_recipe(recipe(**each)), "s", texts)
        }
        for each in ({}, changes)
    )
    assert [key for key in before if before[key] == after[key]] == kept
    assert not set(names(texts)) & set(names(texts, source="another"))


def test_each_shape_is_timed_once(texts: Texts) -> None:
    """A budget is spread by each method in its own way; of stated heads the method says nothing."""

    def timed(variant: dict, **changes) -> list[str]:
        changes |= {"variant": [variant], "speed": {"contexts": [8]}, "grid__methods": ["mean", "random"]}
        recipe_of = parse_recipe(recipe(**changes))
        return [str(cell) for cell in cells(recipe_of, "s", texts) if cell.kind == "speed"]

    assert timed({"kv_heads": 1, "name": "v"}) == [
        "speed of original, span full", "speed of v mean, span full",
    ]  # fmt: skip
    expected = [f"speed of {m}, span full" for m in ("original", "v mean", "v random seed 0")]
    assert timed({"kv_budget": 0.5, "name": "v"}) == expected
    assert timed({"kv_heads": 3, "unequal_groups": True, "name": "v"}) == expected


def test_times_are_named_by_the_tokens_of_a_step(texts: Texts) -> None:
    """Said, or the engine's own number on the device: it is part of what bounds a window's pages."""
    speed = {"speed": {"contexts": [8]}, "engine__max_num_batched_tokens": None}
    found = [
        {cell.config["speed"]["step_tokens"] for cell in cells(parse_recipe(each), "s", texts)[-1:]}
        for each in (recipe(**speed), recipe(**{**speed, "engine__max_num_batched_tokens": 64}))
    ]
    assert found == [{2048}, {64}]


def test_a_changed_text_renames_what_was_measured_or_learnt_on_it(texts: Texts, tmp_path: Path) -> None:
    before = names(texts)
    path = tmp_path / "rhyme.txt"
    path.write_text(path.read_text().replace("one", "uno"))
    after = names(Texts(tmp_path, tmp_path / "kept"))
    assert set(before) & set(after) == {before[0]}  # heads are compared on the built-in text


def test_parts_of_texts(texts: Texts, tmp_path: Path) -> None:
    whole = (tmp_path / "rhyme.txt").read_text()
    parts = [TextPart("rhyme.txt", a, b) for a, b in ((0.0, 0.3), (0.3, 0.8), (0.8, 1.0))]
    assert "".join(map(texts.content, parts)) == whole
    assert texts.path(parts[1]).read_text() == texts.content(parts[1])
    assert texts.path(parts[1]) == texts.path(parts[1])
    assert [label(part) for part in parts[:1]] == ["rhyme.txt 0 to 0.3"]
    with pytest.raises(RequestError, match=r"no text from 0 to 0\.001"):
        texts.content(TextPart("rhyme.txt", 0.0, 0.001))
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    with pytest.raises(RequestError, match=r"bad\.txt: byte 1 is not valid UTF-8"):
        texts.content(TextPart("bad.txt"))
    with pytest.raises(OSError, match=r"none\.txt"):
        texts.content(TextPart("none.txt"))


# --------------------------------------------------------------------------------------------- the files


CELL = Cell("quality", Model(), "full", {"kind": "quality", "model": {"source": "s"}, "span": "full"})


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[CellFolder, Path, bytes]:
    folder = CellFolder(tmp_path_factory.mktemp("cells"))
    assert folder.read(CELL) is None
    folder.write(CELL, RECORD)
    assert folder.read(CELL) == RECORD
    path = folder.path / f"{CELL.name}.json"
    return folder, path, path.read_bytes()


@given(st.data())
@settings(max_examples=60)
def test_a_torn_or_changed_file_is_no_cell(written, data) -> None:
    folder, path, whole = written
    if data.draw(st.booleans()):
        broken = whole[: data.draw(st.integers(0, len(whole) - 2))]  # all but its line end
    else:
        place = data.draw(st.integers(0, len(whole) - 2))
        broken = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    path.write_bytes(broken)
    found = folder.read(CELL)
    assert found is None or (found == RECORD and json.loads(broken) == json.loads(whole))
    path.write_bytes(whole)
    assert folder.read(CELL) == RECORD


def test_a_cell_under_another_name_is_not_believed(tmp_path: Path) -> None:
    folder = CellFolder(tmp_path)
    folder.write(CELL, RECORD)
    other = Cell("quality", Model(), "full", {**CELL.config, "span": "window:8"})
    (tmp_path / f"{CELL.name}.json").rename(tmp_path / f"{other.name}.json")
    assert folder.read(other) is None
