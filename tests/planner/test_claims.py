"""Every claim of two texts on long sequences is worked out, or stands here with the reason why it is not.

The claims with what is right: docs/bottlenecks.md. A1 to A21, a chapter on long sequences, are the tests
`test_aNN_...` of test_claims_long_sequences.py; B1 to B25, a chapter on serving, `test_bNN_...` of
test_claims_serving.py.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent

NOT_NUMERIC = {
    "B21": "a flag of another engine's command line, which does not exist there",
    "B22": "another engine's default, which changed from 0.9 to 0.92; A8 shows what prevents fragmentation",
    "B24": "accuracy: the planner counts bytes and operations; test_walls.py holds that its remedies say "
    "where a change is lossy, tests/runtime/test_kv_dtypes.py and tests/model/test_quantized.py what it does",
    "B25": "advice on how to measure, which `jaxinfer bench` follows (percentiles, loads, objectives)",
}
"""Claims that no arithmetic decides."""

ALL = [f"A{n}" for n in range(1, 22)] + [f"B{n}" for n in range(1, 26)]


def worked_out() -> set[str]:
    names: set[str] = set()
    for file in ("test_claims_long_sequences.py", "test_claims_serving.py"):
        found = re.findall(
            r"^def test_([ab])(\d\d)_", (HERE / file).read_text(encoding="utf-8"), re.MULTILINE
        )
        names |= {f"{chapter.upper()}{int(number)}" for chapter, number in found}
    return names


def test_each_of_the_46_claims_is_worked_out_or_is_not_numeric() -> None:
    assert len(ALL) == 46
    assert sorted([*worked_out(), *NOT_NUMERIC]) == sorted(ALL)
