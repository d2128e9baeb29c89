"""The public operation, and which implementation serves it on which device."""

from __future__ import annotations

import jax

from pallas_kernels import reference, xla
from pallas_kernels.batch import RaggedBatch


def backends(platform: str | None = None) -> dict[str, str]:
    """Every attention backend with the reason why it does not serve `platform`; "" when it does."""
    platform = platform or jax.default_backend()
    return {name: reason(platform) for name, (_, reason) in _BACKENDS.items()}


def resolve_backend(name: str, platform: str) -> str:
    """The backend that `name` ("auto" for the best one) means on `platform`.

    Raises NotImplementedError with the reason when a named backend does not serve the platform.
    """
    if name == "auto":
        return next(known for known, reason in backends(platform).items() if not reason)
    if name not in _BACKENDS:
        raise NotImplementedError(
            f"attention backend {name!r} does not exist; there are {', '.join(_BACKENDS)}"
        )
    reason = _BACKENDS[name][1](platform)
    if reason:
        raise NotImplementedError(f"attention backend {name!r} does not serve {platform}: {reason}")
    return name


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    batch: RaggedBatch,
    *,
    decode_rows: int,
    scale: float,
    window: int | None = None,
    backend: str,
) -> jax.Array:
    """Causal attention of packed queries over paged keys and values.

    `window` W lets a query at position p see the keys p - W + 1 .. p only (Mistral, 2310.06825); pages that
    lie wholly before that are not read, and their entries in the table may be 0.

    q [T, N, H]; k_pages, v_pages [M, K, Z, H]; returns [T, N, H] in q's dtype; softmax in float32. The
    first `decode_rows` tokens are one-query rows (see RaggedBatch). `reference.paged_attention` is the
    specification; `backend` is a name from `resolve_backend`.
    """
    function, _ = _BACKENDS[backend]
    return function(q, k_pages, v_pages, batch, decode_rows=decode_rows, scale=scale, window=window)


def _reference(q, k_pages, v_pages, batch, *, decode_rows, scale, window):
    del decode_rows  # the specification needs no hint about the shape of the batch
    return reference.paged_attention(q, k_pages, v_pages, batch, scale=scale, window=window)


_BACKENDS = {  # best first
    "xla": (xla.paged_attention, lambda platform: ""),
    "reference": (_reference, lambda platform: ""),
}
