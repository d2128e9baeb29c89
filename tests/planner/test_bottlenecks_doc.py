"""The tables of docs/bottlenecks.md, held to the planner: no figure outlives a change of the arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from stated import GB, GIB, KIB, TERA, agrees, costs_of
from test_claims import ALL

from jaxinfer import cli
from jaxinfer.planner import DEVICES, ModelCosts, Plan, Workload, plan, plan_memory, remedies

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "bottlenecks.md").read_text(encoding="utf-8")
A100 = DEVICES["a100-80g"]


def table(first: str) -> list[dict[str, str]]:
    """Rows of the only table whose first column is called `first`, by column."""
    lines = TEXT.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")]
    assert len(starts) == 1, f"{len(starts)} tables begin with a column {first!r}"
    names = cells(lines[starts[0]])
    rows = []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        assert len(cells(line)) == len(names), line
        rows.append(dict(zip(names, cells(line), strict=True)))
    assert len(rows) >= 5
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def check(row: dict[str, str], values: dict[str, float]) -> None:
    """Every number of a row is the planner's, to the digits that are printed."""
    for name, value in values.items():
        assert agrees(value, row[name]), f"{name} of {row} is {value}"
    assert len(row) - len(values) <= 3  # the columns that say what the row is of


def seven(kv_heads: int | None = None) -> ModelCosts:
    return costs_of("llama2-7b", kv_heads=kv_heads)


def load(costs: ModelCosts, **workload: int) -> Plan:
    return plan("llama2-7b", costs, A100, Workload(output=256, **workload))


@pytest.mark.parametrize("row", table("model"), ids=lambda row: row["model"])
def test_what_models_take(row: dict[str, str]) -> None:
    name, _, grouped = row["model"].partition(" as GQA-")
    costs = costs_of(name, kv_heads=int(grouped) if grouped else None)
    values = {
        "KV heads": costs.config.layers[0].num_kv_heads,
        "KiB a token": costs.kv_bytes_per_token / KIB,
        "weights GB": costs.weight_bytes / GB,
        "weights GiB": costs.weight_bytes / GIB,
    }
    for length, kv, batch in (
        (4096, "K/V of 4K, GiB", "largest batch at 4K"), (32768, "of 32K, GiB", "at 32K"),
    ):  # fmt: skip
        values[kv] = length * costs.kv_bytes_per_token / GIB
        values[batch] = plan_memory(costs, A100.memory_bytes, max_model_len=length).largest_batch
    check(row, values)


def test_70b_on_several() -> None:
    found = re.search(r"`--tp 2`: (\d+) sequences of 4K, `--tp 4`: (\d+);", TEXT)
    assert found
    for devices, stated in zip((2, 4), found.groups(), strict=True):
        costs = costs_of("llama2-70b", tensor_parallel=devices)
        assert plan_memory(costs, A100.memory_bytes, max_model_len=4096).largest_batch == int(stated)


@pytest.mark.parametrize("row", table("prompt"), ids=lambda row: row["prompt"])
def test_what_prompts_cost(row: dict[str, str]) -> None:
    phase = load(seven(), context=int(row["prompt"]), batch=1).prefill
    check(row, {
        "weights TFLOP": phase.linear_operations / TERA,
        "attention TFLOP": phase.attention_operations / TERA,
        "together": phase.operations / TERA,
        "attention's share %": 100 * phase.attention_operations / phase.operations,
        "against 2K": phase.operations / sum(seven().prefill_operations(2048)),
        "TTFT floor s": phase.floor_s,
        "expected s": phase.expected_s,
    })  # fmt: skip


def test_even_lengths() -> None:
    for name, stated in (
        ("llama2-7b", "49,407"),
        ("llama2-13b", "61,951 for 13B"),
        ("llama2-70b", "104,447 for 70B"),
    ):
        assert f"{costs_of(name).even_length:,}" == stated.partition(" ")[0]
        assert stated in TEXT


@pytest.mark.parametrize("row", table("KV heads"), ids=lambda row: "-".join(list(row.values())[:3]))
def test_what_tokens_cost(row: dict[str, str]) -> None:
    got = load(seven(int(row["KV heads"])), context=int(row["prompt"]), batch=int(row["batch"]))
    phase = got.decode
    assert row.pop("fits") == ("no" if got.walls[0] == "capacity" else "yes")
    check(row, {
        "GiB a step": phase.moved_bytes / GIB,
        "TPOT floor ms": 1e3 * phase.floor_s,
        "expected ms": 1e3 * phase.expected_s,
        "tok/s at most": int(row["batch"]) / phase.floor_s,
        "of 312 TFLOP/s, %": 100 * phase.operations / phase.floor_s / A100.rate("bfloat16"),
    })  # fmt: skip


@pytest.mark.parametrize("row", table("batch"), ids=lambda row: row["batch"])
def test_the_knee(row: dict[str, str]) -> None:
    got = load(seven(), context=512, batch=int(row["batch"]))
    check(row, {
        "TPOT ms": 1e3 * got.decode.expected_s,
        "tok/s while decoding": got.workload.batch / got.decode.expected_s,
        "last TTFT s": got.batch_ttft_s,
        "tok/s in all": got.tokens_per_s,
    })  # fmt: skip


def test_chunks_against_stalls() -> None:
    found = re.search(r"the stall from (\S+) to\s+(\S+) ms and the last TTFT from (\S+) to (\S+) s", TEXT)
    assert found
    large, small = (
        plan("llama2-7b", seven(), A100, Workload(context=2048, batch=16, max_num_batched_tokens=budget))
        for budget in (2048, 512)
    )
    values = 1e3 * large.stall_s, 1e3 * small.stall_s, large.batch_ttft_s, small.batch_ttft_s
    for value, stated in zip(values, found.groups(), strict=True):
        assert agrees(value, stated)


def changes(base: Plan) -> Iterator[tuple[str, Plan]]:
    yield "as it is", base
    for remedy in remedies(base):
        yield remedy.name, remedy.plan


def test_what_remedies_buy() -> None:
    found = dict(changes(load(seven(), context=4096, batch=16)))
    for row in table("change"):
        got = found[row["change"].removesuffix("*")]
        assert row["change"].endswith("*") is (got.walls[0] == "capacity")
        check(row, {
            "K/V KiB a token": got.costs.kv_bytes_per_token / KIB,
            "largest batch": got.memory.largest_batch,
            "one TTFT ms": 1e3 * got.prefill.expected_s,
            "TPOT ms": 1e3 * got.decode.expected_s,
            "stall ms": 1e3 * got.stall_s,
            "tok/s in all": got.tokens_per_s,
        })  # fmt: skip


COMMANDS = re.findall(r"^    (jaxinfer plan [^#\n]*[^#\s])", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_and_prints_the_plan(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, name, *flags = command.split()
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert cli.main(command.split()[1:]) == 0
    said = capsys.readouterr().out
    costs = costs_of(name, tensor_parallel=int(given.get("--tp", 1)))
    sizes = {key: int(given[f"--{key}"]) for key in ("context", "batch", "output") if f"--{key}" in given}
    got = plan(name, costs, DEVICES[given["--device"]], Workload(**sizes))
    assert re.search(rf"largest batch +{got.memory.largest_batch} sequences", said)
    assert re.search(rf"read at least .* {got.decode.moved_bytes / GIB:.2f} GiB\n", said)
    assert f"{costs.kv_bytes_per_token / KIB:g} KiB" in said
    for change, remedy in changes(got):
        star = "*" * (remedy.walls[0] == "capacity")
        row = next(line for line in said.splitlines() if line.startswith(f"{change}{star} "))
        assert re.split(r"\s{2,}", row)[2] == str(remedy.memory.largest_batch)


def test_every_table_has_its_command() -> None:
    assert len(COMMANDS) >= 8


def test_every_claim_stands_there_once() -> None:
    assert re.findall(r"^\| ([AB]\d+) \|", TEXT, re.MULTILINE) == ALL
