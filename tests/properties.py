"""What property tests share: how hypothesis searches, and strategies for ragged batches and the ways to cut them up."""

from hypothesis import settings
from hypothesis import strategies as st

# The same examples on every machine and in every run; no deadline per example, since the first one pays for imports.
PROPERTY = settings(max_examples=15, deadline=None, derandomize=True, database=None)

SEEDS = st.integers(0, 2**31 - 1)  # of torch's generators: hypothesis draws the shapes, they draw the numbers


@st.composite
def cuts(draw: st.DrawFn, size: int, *, ordered: bool = False) -> list[list[int]]:
    """The numbers below `size`, in any order unless `ordered`, cut into parts, of which some may be empty."""
    order = list(range(size)) if ordered else draw(st.permutations(range(size)))
    places = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
    return [order[start:end] for start, end in zip([0, *places], [*places, size], strict=True)]
