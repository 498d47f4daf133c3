"""Where tensors begin in a buffer of bytes that holds several."""

ALIGNMENT = 64  # bytes; more than any dtype needs, and one cache line


def aligned(num_bytes: int) -> int:
    """Return the first place at or after `num_bytes` where a tensor may begin.

    Example:
        ``aligned(40) == 64``
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
