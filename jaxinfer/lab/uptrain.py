"""Uptraining: a model, most often one converted to fewer KV heads, learns from texts (2305.13245).

    uptrain("smollm2-mqa", "smollm2-mqa-up", ["corpus.txt"], Settings(steps=200, train="kv"))

The module trained is the one that serves, `Llama.dense`; the result is a checkpoint folder like any other.
What happens on the way stands in DST.training: the loss curve, and states from which a run that was broken
off goes on, bit for bit on the same machine.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from checkpoints import writing
from jaxinfer.convert import check_places, write_model
from jaxinfer.core import ConfigError
from jaxinfer.lab import selection
from jaxinfer.lab.checkpoint import TrainingFolder
from jaxinfer.lab.data import Blocks, Order, pack, token_stream
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.subject import Subject, digest, load, open_subject, refuse_another_language, tensors
from jaxinfer.lab.trainer import Trainer, TrainState, batch_of, refuse_no_numbers
from jaxinfer.model import mesh as devices
from jaxinfer.progress import phase
from jaxinfer.runtime.loading import claim_memory, use_compile_cache
from jaxinfer.text.files import read_texts


def uptrain(
    model: str | Path,
    destination: str | Path,
    data: Sequence[str | Path],
    settings: Settings,
    *,
    resume: bool = False,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Train `model` on the texts of files, write it to the new folder `destination`, and tell what happened.

    `resume` goes on from the newest state in DST.training, of a run with the same model, data and settings.
    Returns the report that the command prints. Raises ConfigError or RequestError for settings, models and
    files that do not go together, and while another training writes there, CheckpointError for what cannot
    be read or written, TrainingError when loss or gradients are not finite.
    """
    use_compile_cache(None)
    claim_memory()
    subject, destination = open_subject(str(model)), Path(destination).expanduser()
    original = None if settings.distill is None else open_subject(settings.distill)
    check_places(subject.path, destination)
    writing.check_free(destination)
    subject = _seeing(subject, settings)
    mesh = _mesh(settings)
    blocks, held_out = _data(subject, original, data, settings)

    folder = TrainingFolder(destination)
    graph, loaded = load(subject, "f32", settings, mesh, progress)
    teaching = None if original is None else load(original, settings.dtype, settings, mesh, progress)
    run = {
        "model": digest(loaded), "original": None if teaching is None else digest(teaching[1]),
        "data": blocks.digest(), "devices": mesh.size,
    }  # fmt: skip
    if resume:
        folder.old_run()  # no folder is left of one that never was
    with folder.held():
        writing.check_free(destination)  # again: another training may have come to its end meanwhile
        folder.begin({**settings.fixed(), **run}, resume=resume)
        trained, frozen = selection.split(subject.config, loaded, settings.train)
        trainer = Trainer(graph, jax.eval_shape(lambda x: x, loaded), settings, mesh, teaching)
        frozen = trainer.place(frozen)
        record = folder.newest() if resume else None
        if record is None:
            state = trainer.begin(trained)
            record = {"step": 0, "position": 0, "targets": 0, "seconds": 0.0}
        else:
            state = folder.restore(record["step"], trainer.shapes(trained))
        del loaded, trained
        state, pace = _train(trainer, state, frozen, blocks, held_out, folder, record, progress)
        write_model(
            destination, subject.checkpoint, tensors(subject, state.trained, settings), to=settings.to,
            title=f"writing {destination.name}", progress=progress,
        )  # fmt: skip
        report = _report(subject, destination, folder, settings, state, record, pace)
        folder.finish(report)
        return report


# ----------------------------------------------------------------------------------------- beforehand


def _seeing(subject: Subject, settings: Settings) -> Subject:
    """The model with its queries seeing what the settings say; what it learns from sees what it always does.
    Its checkpoint stays as it is."""
    span = settings.span()
    return subject if span is None else replace(subject, config=subject.config.spanned(span))


def _mesh(settings: Settings) -> jax.sharding.Mesh:
    here = jax.devices()
    wanted = len(here) if settings.devices is None else settings.devices
    if wanted > len(here):
        raise ConfigError(f"devices {wanted}: there are {len(here)} here")
    if settings.batch % wanted:
        raise ConfigError(
            f"batch {settings.batch} cannot be shared by {wanted} devices; take a multiple, or fewer devices"
        )
    return devices.device_mesh(here[:wanted])


def _data(
    subject: Subject, original: Subject | None, data: Sequence[str | Path], settings: Settings
) -> tuple[Blocks, Blocks | None]:
    """Blocks to learn from, and held-out ones."""
    config, tokenizer = subject.config, subject.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{subject.path}: has no tokenizer, and texts cannot be read without one")
    if settings.sequence_length > config.longest_position:
        raise ConfigError(
            f"sequence_length {settings.sequence_length} is more than the model's own limit of "
            f"{config.longest_position}"
        )
    if original is not None:
        refuse_another_language(subject, original)

    def blocks(files: Sequence[str | Path], most: int | None = None) -> Blocks:
        stream = token_stream(tokenizer, read_texts(files), config.vocab_size)
        return pack(stream, settings.sequence_length, most_targets=most)

    return blocks(data), blocks(settings.eval_file, settings.eval_tokens) if settings.eval_file else None


# -------------------------------------------------------------------------------------------- the way


@dataclass(slots=True)
class Pace:
    """Targets and seconds of updates, without compiling, evaluating and saving."""

    targets: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self.targets / self.seconds if self.seconds else None


def _train(
    trainer: Trainer,
    state: TrainState,
    frozen: selection.Arrays,
    blocks: Blocks,
    held_out: Blocks | None,
    folder: TrainingFolder,
    record: dict[str, Any],
    progress: bool | None,
) -> tuple[TrainState, Pace]:
    """All updates after those of `record`."""
    settings = trainer.settings
    order = Order(len(blocks), settings.seed)
    taken = settings.batch * settings.accumulate
    first, position, targets = record["step"], record["position"], record["targets"]
    began, pace = time.monotonic() - record["seconds"], Pace()
    last_saved = first
    with (
        folder.open_log(up_to_step=first if first else -1) as log,
        phase("uptraining", total=settings.num_steps, wanted=progress is not False) as advance,
    ):

        def tell(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")

        def evaluate(step: int) -> None:
            if held_out is not None:
                loss = trainer.evaluate(state, frozen, held_out)
                tell(step=step, eval_loss=loss, eval_tokens=held_out.num_targets)

        def save(step: int) -> None:
            log.flush()
            kept = {"position": position, "targets": targets, "seconds": time.monotonic() - began}
            folder.save(step, state, {**kept, "seed": settings.seed})

        if first == 0:
            evaluate(0)
        advance(first)
        for step in range(first + 1, settings.num_steps + 1):
            start = time.monotonic()
            tokens, counted = batch_of(blocks, order.take(position, taken), settings)
            state, figures = trainer.step(state, frozen, step - 1, tokens, counted)
            kept = (
                f"The state after step {last_saved} is in {folder.path}."
                if last_saved
                else "Nothing is kept."
            )
            refuse_no_numbers(step, figures, kept)
            now = time.monotonic()
            count = int(counted.sum())
            position, targets = position + taken, targets + count
            if step > first + 1:  # the first one compiles
                pace.targets, pace.seconds = pace.targets + count, pace.seconds + now - start
            line: dict[str, Any] = {"step": step, "loss": float(figures.loss)}
            if settings.distill is not None:
                line |= {
                    "cross_entropy": float(figures.cross_entropy), "divergence": float(figures.divergence)
                }  # fmt: skip
            line["learning_rate"] = float(figures.learning_rate)
            line["gradient_norm"] = float(figures.gradient_norm)
            tell(**line, tokens=targets, seconds=round(now - began, 3))
            advance(1, f"loss {line['loss']:.4f}, {count / (now - start):.0f} tokens/s")
            last = step == settings.num_steps
            if last or (settings.eval_every and step % settings.eval_every == 0):
                evaluate(step)
            if settings.save_every and (last or step % settings.save_every == 0):
                save(step)
                last_saved = step
    return state, pace


# ------------------------------------------------------------------------------------------ afterwards


def _report(
    subject: Subject,
    destination: Path,
    folder: TrainingFolder,
    settings: Settings,
    state: TrainState,
    record: dict[str, Any],
    pace: Pace,
) -> dict[str, Any]:
    lines = folder.read_log()
    curve = [line for line in lines if "loss" in line]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return {
        "model": str(subject.path),
        "destination": str(destination),
        "train": settings.train,
        "attention_span": settings.attention_span,
        "trained_parameters": selection.count(state.trained),
        "parameters": subject.config.num_params,
        "steps": settings.num_steps,
        "resumed_at_step": record["step"] or None,
        "tokens": curve[-1]["tokens"],
        "first_loss": curve[0]["loss"],
        "last_loss": curve[-1]["loss"],
        "first_eval_loss": held_out[0] if held_out else None,
        "last_eval_loss": held_out[-1] if held_out else None,
        "tokens_per_s": None if pace.tokens_per_s is None else round(pace.tokens_per_s, 1),
        "seconds": curve[-1]["seconds"],
        "peak_memory_bytes": peak_memory_bytes(),
        "log": str(folder.log_path),
    }


def peak_memory_bytes() -> int:
    """Most that was held at a time: of the device's memory, or on CPU of the process'."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
