"""Structures made to hurt: refused, or served within their limits, in well under a second and some megabytes.

They run in a process of their own, because what is guarded against ends a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = """
import resource, random, sys, threading, time
sys.path[:0] = ["tests", "tests/text"]
from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.text import ByteTokenizer
from jaxinfer.text.grammar import GrammarCompiler

def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema

def chain(count, link):
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "string"}}}

def rules(count, body="{}", name="r"):
    lines = [f"{name}{i}: " + body.format(f"{name}{i + 1}") for i in range(count)]
    return "\\n".join([f"start: {name}0", *lines, f'{name}{count}: "x"'])

def attack(field, value):
    compiler = GrammarCompiler(ByteTokenizer(), 259)
    compiler.check(SamplingParams(regex="warm"))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        matcher = compiler.matcher(SamplingParams(**{field: value}))
        said = "compiled"
    except RequestError as error:
        assert error.param == field, error.param
        said, matcher = f"refused: {error}", None
    seconds, worst, draw = time.process_time() - start, 0.0, random.Random(0)
    try:
        for _ in range(300 if matcher else 0):
            start = time.process_time()
            if matcher.finished:
                break
            mask = int.from_bytes(matcher.mask(), "little")
            worst = max(worst, time.process_time() - start)
            allowed = [token for token in range(256) if mask >> token & 1]
            if not allowed:
                break
            matcher.accept(draw.choice(allowed))
    except RuntimeError as error:
        said = f"contained: {error}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{seconds:.3f} {worst:.3f} {grown:.0f} {said}")
"""
BOMBS = {
    "repetition": ("regex", "'a{1,100000000}'", ""),
    "nested repetition": ("regex", "'((a{1,100}){1,100}){1,100}'", "contained"),
    "exponential": ("regex", "'(a|b)*a(a|b){30}'", ""),
    "many optional": ("regex", "'(?:a|b|c)?' * 1600", ""),
    "wide classes": ("regex", r"r'\w{1000}\p{L}{1000}'", ""),
    "deep pattern": ("regex", "'(' * 8000 + 'a' + ')' * 8000", "refused"),
    "long pattern": ("regex", "'a' * 20000", "refused"),
    "deep schema": ("json_schema", "nested(300)", "refused"),
    "allowed depth": ("json_schema", "nested(60)", ""),
    "very deep schema": ("json_schema", "'{\"items\":' * 5000 + '{}' + '}' * 5000", "refused"),
    "large enum": ("json_schema", "{'enum': [f'v{i}' for i in range(6000)]}", "compiled"),
    "enormous enum": ("json_schema", "{'enum': [f'v{i}' for i in range(60000)]}", "refused"),
    "chain of references": ("json_schema", "chain(900, lambda r: {'properties': {'x': r}})", "refused"),
    "allowed chain": ("json_schema", "chain(195, lambda r: {'properties': {'x': r}})", "compiled"),
    "deep references": ("json_schema", "chain(250, lambda r: {'properties': {'x': r}})", "refused"),
    "allowed items": ("json_schema", "chain(130, lambda r: {'items': {'items': r}})", "compiled"),
    "empty recursion": ("json_schema", "{'$ref': '#'}", "refused"),
    "doubling": ("json_schema", "chain(25, lambda r: {'allOf': [{'anyOf': [r, r]}, {'anyOf': [r, r]}]})", ""),
    "many properties": ("json_schema", "{'properties': {f'p{i}': {} for i in range(5000)}}", "refused"),
    "allowed properties": ("json_schema", "{'properties': {f'p{i}': {} for i in range(1000)}}", "compiled"),
    "long string": ("json_schema", "{'type': 'string', 'minLength': 10**5, 'maxLength': 10**7}", ""),
    "long array": ("json_schema", "{'type': 'array', 'minItems': 10**4, 'maxItems': 10**8}", ""),
    "multiple of a large prime": ("json_schema", "{'type': 'integer', 'multipleOf': 982451653}", ""),
    "pattern in a schema": ("json_schema", "{'type': 'string', 'pattern': '(a|b)*a(a|b){30}'}", ""),
    "chain of rules": ("grammar", "rules(3000)", "refused"),
    "allowed rules": ("grammar", "rules(990)", "compiled"),
    "brackets in rules": ("grammar", "rules(500, '(' * 20 + '{}' + ')' * 20)", "refused"),
    "allowed brackets": ("grammar", "rules(45, '(' * 20 + '{} \"a\"' + ')' * 20)", ""),
    "allowed terminals": ("grammar", "rules(45, '(' * 20 + '{} \"a\"' + ')' * 20, 'R')", ""),
    "repeated rules": ("grammar", "'start: a{1,1000}\\na: b{1,1000}\\nb: c{1,1000}\\nc: \"x\"'", "contained"),
    "ambiguity": ("grammar", "'start: start \"a\" | start start | \"a\"'", ""),
    "nothing over and over": ("grammar", "'start: s\\ns: s s s s | \"\"'", ""),
    "long grammar": ("grammar", "'start: \"' + 'a' * 70000 + '\"'", "refused"),
    "choices": ("choice", "[f'choice {i}' for i in range(4000)]", "compiled"),
    "long choices": ("choice", "['x' * 30000, 'y' * 40000]", "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_does_no_harm(name: str) -> None:
    field, value, expected = BOMBS[name]
    # On a thread, as the server compiles: its stack is the smaller one.
    code = SETUP + f"thread = threading.Thread(target=attack, args=({field!r}, {value}))\n"
    code += "thread.start()\nthread.join()\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:] or f"the process ended with {done.returncode}"
    seconds, worst, megabytes, said = done.stdout.split(" ", 3)
    print(done.stdout)
    assert said.startswith(expected), done.stdout
    # CPU time: the worst compile takes 0.2 s and the worst mask 0.02 s.
    assert float(seconds) < 1.0, done.stdout
    assert float(worst) < 0.5, done.stdout
    assert float(megabytes) < 128, done.stdout
