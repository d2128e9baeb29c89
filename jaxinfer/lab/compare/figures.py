"""What is measured of one model: quality, speed (predicted and measured), likeness of heads. All as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

import checkpoints
from jaxinfer.bench.context import context as measure_contexts
from jaxinfer.bench.target import InProcess
from jaxinfer.bench.workbench import Workbench
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.heads import merge
from jaxinfer.heads.calibrate import activations, calibration_pieces, loaded
from jaxinfer.lab.compare.recipe import FULL, Evaluation, Speed
from jaxinfer.lab.evaluate import (
    Estimate,
    Text,
    evaluate_agreement,
    evaluate_choices,
    evaluate_perplexity,
    read_questions,
)
from jaxinfer.llm import LLM
from jaxinfer.planner import ModelCosts, RooflineTime, Steps, device_sheet, plan_memory, tpot_s, ttft_s

MANY = 1 << 40
"""Sequences of an engine whose largest batch memory alone limits."""
SIMILARITY_TOKENS = 2048


def open_model(model: Path, span: str, engine: dict[str, Any]) -> LLM:
    """The model, its queries seeing what `span` says; all else as `engine` has it."""
    return LLM(str(model), attention_span=None if span == FULL else span, progress=False, **engine)


def shape_of(model: Path) -> dict[str, Any]:
    """KV heads of each layer (and whose K/V each reads, where layers share), query heads, parameters, KV
    bytes of a token in bfloat16."""
    config = ModelConfig.from_hf(checkpoints.open_checkpoint(model).config)
    shared = {"kv_from": [layer.kv_from for layer in config.layers]} if config.sharing_layers else {}
    return {
        "kv_heads": [layer.num_kv_heads for layer in config.layers],
        **shared,
        "query_heads": config.num_heads,
        "parameters": config.num_params,
        "kv_bytes_per_token": ModelCosts(config).kv_bytes_per_token,
    }


def quality(
    model: Path,
    original: Path | None,
    span: str,
    evaluation: Evaluation,
    texts: list[Text],
    questions: list[Path],
    engine: dict[str, Any],
) -> dict[str, Any]:
    """`perplexity` of each text, `choices` of each file and of all of a format, `agreement` with the original
    (None: not asked for), which has its full span."""
    tasks = [read_questions(str(file), evaluation.questions) for file in questions]
    found: dict[str, Any] = {"shape": shape_of(model)}
    with open_model(model, span, engine) as llm:
        found["perplexity"] = [
            {
                "name": one.name, "windows": one.windows, "counted": one.counted,
                "nll_per_token": plain(one.nll_per_token), "per_token": plain(one.per_token),
                "bits_per_byte": plain(one.bits_per_byte),
            }
            for one in evaluate_perplexity(llm, texts, evaluation.windowing)
        ]  # fmt: skip
        found["choices"] = [
            {"name": one.name, "count": one.count, "acc": plain(one.acc), "acc_norm": plain(one.acc_norm)}
            for one in (evaluate_choices(llm, tasks) if tasks else [])
        ]
        found["agreement"] = None
        if original is not None and evaluation.agreement:
            with open_model(original, FULL, engine) as other:
                one = evaluate_agreement(
                    other, llm, texts[0], evaluation.windowing, exact_kl=span == FULL, greedy_tokens=0
                )
            found["agreement"] = {
                "name": one.name, "same_next": plain(one.same_next), "kl_bound": plain(one.kl_bound),
                "kl": None if one.kl is None else plain(one.kl),
            }  # fmt: skip
    return found


def plain(estimate: Estimate) -> dict[str, float | None]:
    """An estimate as JSON; what is not finite is null."""
    value = estimate.value if math.isfinite(estimate.value) else None
    return {"value": value, "stderr": estimate.stderr}


def speed(model: Path, span: str, wanted: Speed, engine: dict[str, Any]) -> dict[str, Any]:
    """`predicted` for a device and `measured` here, a row for each context. Seconds and bytes.

    `kv_bytes`: of the most pages that one sequence holds at a time: a window bounds them, by itself and the
    tokens of a step (`step_tokens`). `largest_batch`: sequences of that length that fit beside the weights.
    """
    config = ModelConfig.from_hf(checkpoints.open_checkpoint(model).config)
    run = EngineConfig(attention_span=None if span == FULL else span, **engine)
    seen = run.span()
    config = config if seen is None else config.spanned(seen)
    costs, sheet = ModelCosts(config, page_size=run.page_size), device_sheet(wanted.device)
    time = RooflineTime(costs, sheet)  # and not `plan`, whose TTFT of a whole batch takes batch ** 2
    tokens = step_tokens(wanted, engine)
    steps = Steps(wanted.batch, max(tokens, wanted.batch), sheet.platform)  # the batch decodes in one step
    predicted = []
    for context in wanted.contexts:
        memory = plan_memory(
            costs, sheet.memory_bytes, max_model_len=context + wanted.output, max_num_seqs=MANY,
            max_num_batched_tokens=tokens,
        )  # fmt: skip
        predicted.append(
            {
                "context": context, "ttft_s": ttft_s(time, [context], steps)[0],
                "tpot_s": tpot_s(time, wanted.batch, context, wanted.output, steps),
                "kv_bytes": memory.page_bytes * memory.pages_per_sequence,
                "largest_batch": memory.largest_batch,
            }
        )  # fmt: skip
    return {
        "shape": shape_of(model), "device": sheet.name, "batch": wanted.batch, "output": wanted.output,
        "predicted": predicted, "measured": _measured(model, span, wanted, engine),
    }  # fmt: skip


def step_tokens(wanted: Speed, engine: dict[str, Any]) -> int:
    """Most tokens of a step: what `engine` says, or else what an engine takes on that kind of device."""
    run = EngineConfig(**engine).on(device_sheet(wanted.device).platform)
    assert run.max_num_batched_tokens is not None
    return run.max_num_batched_tokens


def _measured(model: Path, span: str, wanted: Speed, engine: dict[str, Any]) -> list[dict[str, Any]]:
    """One request at a time, of the engine in this process."""
    if not wanted.measured_contexts:
        return []
    with open_model(model, span, engine) as llm:
        found = measure_contexts(
            Workbench(InProcess(llm)), list(wanted.measured_contexts), wanted.measured_output,
            repeats=wanted.repeats, seed=0, warm_up=1,
        )  # fmt: skip
    return [
        {
            "context": run["context"], "ttft_s": run["measured"]["ttft_s"]["p50"],
            "tpot_s": run["measured"]["tpot_s"]["p50"], "kv_bytes": run["kv_bytes"],
        }
        for run in found["runs"]
    ]  # fmt: skip


def similarity(model: Path, calibration: Path | None, tokens: int | None) -> dict[str, Any]:
    """How alike the KV heads of each layer are on a text: cosines between what any two of them said, `keys`
    (rotated) and `values`, [layers][K][K]."""
    checkpoint = checkpoints.open_checkpoint(model)
    pieces = calibration_pieces(checkpoint, calibration, tokens or SIMILARITY_TOKENS)
    found: dict[str, Any] = {"tokens": int(pieces.size), "keys": [], "values": []}
    for layer in activations(loaded(checkpoint, progress=False), pieces, progress=False):
        for kind, heads in (("keys", layer.k), ("values", layer.v)):
            products = merge.likeness(merge.moments_of(heads.reshape(-1, *heads.shape[2:])), None)
            found[kind].append(np.round(cosines(products), 4).tolist())
    return found


def cosines(products: np.ndarray) -> np.ndarray:
    """Inner products [K, K] -> cosines [K, K]; of a head that says nothing 0 with any other."""
    size = np.sqrt(np.maximum(np.diagonal(products), 0.0))
    scale = np.outer(size, size)
    return np.where(scale > 0, products / np.where(scale > 0, scale, 1.0), np.eye(len(products)))
