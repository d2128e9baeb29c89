"""The public operation, and which implementation serves it on which device.

A backend is a module `pallas_kernels.NAME` with

    unsupported(device, geometry, interpret) -> str     why it does not serve them, in one line, or ""
    query_tiles(device, geometry) -> tuple[int, ...]    the tiles that it wants chunks cut into
    paged_attention(q, k, v, batch, *, decode_rows, rule, backend) -> jax.Array
    most_pages(geometry) -> int | None                  where it cannot index any pool
    candidates(device, geometry, operation)             where it can be tuned (see `tuning`)
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pages import Pages
from pallas_kernels.rule import Rule

# Best first. Each module gives unsupported, query_tiles and paged_attention; a module is imported when it is
# asked for the first time: what a GPU needs is of no use elsewhere, and may not even import there.
BACKENDS = ("pallas_mosaic", "pallas_triton", "cudnn", "xla", "reference")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.{name}")


def unsupported(backend: Backend, geometry: Geometry) -> str:
    """Why a backend does not serve its device or these shapes; "" when it does."""
    try:
        module = _module(backend.name)
    except ImportError as error:
        return f"cannot be imported with jax {jax.__version__} ({error})"
    return module.unsupported(backend.device, geometry, backend.interpret)


def backends(device: Device, *geometries: Geometry, interpret: bool = False) -> dict[str, str]:
    """Every attention backend with the reason why it does not serve `device` or all of `geometries` (those of
    a model's layers, at least one); "" when it does."""
    assert geometries, "no geometry to serve"
    return {name: _first_reason(Backend(name, device, interpret), geometries) for name in BACKENDS}


def _first_reason(backend: Backend, geometries: tuple[Geometry, ...]) -> str:
    return next(filter(None, (unsupported(backend, geometry) for geometry in geometries)), "")


def resolve_backend(
    name: str,
    device: Device,
    *geometries: Geometry,
    interpret: bool = False,
    without: tuple[str, ...] = (),
) -> Backend:
    """The backend that `name` ("auto" for the best one that is not among `without`) means on `device`.

    Raises NotImplementedError with the reason when a named backend does not serve the device or the shapes.
    """
    if name == "auto":
        reasons = backends(device, *geometries, interpret=interpret)
        served = [known for known, reason in reasons.items() if not reason and known not in without]
        if not served:
            told = "; ".join(f"{known}: {reason or 'passed over'}" for known, reason in reasons.items())
            raise NotImplementedError(f"no attention backend serves {device.kind or device.platform}: {told}")
        name = served[0]
    if name not in BACKENDS:
        raise NotImplementedError(
            f"attention backend {name!r} does not exist; there are {', '.join(BACKENDS)}"
        )
    backend = Backend(name, device, interpret)
    reason = _first_reason(backend, geometries)
    if reason:
        where = device.kind or device.platform
        raise NotImplementedError(f"attention backend {name!r} does not serve {where}: {reason}")
    return backend


def query_tiles(backend: Backend, *geometries: Geometry) -> tuple[int, ...]:
    """Sizes of the query tiles that chunks are cut into (see RaggedBatch), largest first: what the backend
    wants, and where layers want different ones the smallest, which all of them take."""
    module = _module(backend.name)
    return min(module.query_tiles(backend.device, geometry) for geometry in geometries)


def most_pages(backend: Backend, *geometries: Geometry) -> int | None:
    """The most pages of a pool that a backend can index in every layer; None: as many as fit."""
    limit = getattr(_module(backend.name), "most_pages", lambda _: None)
    limits = [most for geometry in geometries if (most := limit(geometry)) is not None]
    return min(limits, default=None)


def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    batch: RaggedBatch,
    *,
    decode_rows: int,
    rule: Rule,
    backend: Backend,
) -> jax.Array:
    """Attention of packed queries over paged keys and values, each query over the keys that `rule` lets it
    see; entries 0 of the page table are holes, whose keys nobody sees.

    q [T, N, H]; k_pages, v_pages [M, K, Z, H]; returns [T, N, H] in q's dtype; softmax in float32. The
    first `decode_rows` tokens are one-query rows (see RaggedBatch). `reference.paged_attention` is the
    specification; `backend` comes from `resolve_backend`, `batch.tiles` are of its `query_tiles`.
    """
    module = _module(backend.name)
    return module.paged_attention(
        q, k_pages, v_pages, batch, decode_rows=decode_rows, rule=rule, backend=backend
    )
