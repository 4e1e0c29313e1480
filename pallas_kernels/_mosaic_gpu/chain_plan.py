"""The plan of a chain of symmetric products: what each reads and where it goes, as data."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

# For each product the sources of its addends, and whether its residual is a source. Sources number
# the inputs, then the results and residuals in the order in which they are made.
type Structure = tuple[tuple[tuple[int, ...], bool], ...]


class Column:
    """The columns of a product's row in a plan.

    They hold the source of the factor, the places of the result and of its residual, the number of
    addends, and their sources. A place of -1 says that no product reads the term. After the sources
    of all addends stands the factor's.
    """

    FACTOR, RESULT, RESIDUAL, COUNT, ADDENDS = range(5)


def plan_chain(
    structure: Structure, num_inputs: int, *, all_in_places: bool = False
) -> tuple[np.ndarray, int]:
    """Returns a plan, and how many places its terms have.

    A result takes the place of a term that is not read any more. That can be one of its own
    addends, because each tile reads its addends before it is stored. It cannot be its factor.

    With `all_in_places`, inputs and the last result have places, too. Input i has place i at first,
    and a source is a place. Otherwise inputs stay, the last result has the place -1, and a source
    is the number of an input, or the number of inputs plus a place.
    """
    made, factor = num_inputs, 0  # the numbers of the next result and of the next factor
    products = []
    last_read: dict[int, int] = {}
    for product, (addends, residual) in enumerate(structure):
        last_read |= dict.fromkeys((factor, *addends), product)
        products.append((factor, addends, made, made + 1 if residual else None))
        factor, made = made, made + 1 + residual
    if all_in_places:
        last_read[factor] = len(structure)
    sources = {i: i for i in range(num_inputs)}
    num_sources, free = num_inputs, []
    first = 0 if all_in_places else num_inputs  # source that is a place

    def place(term: int | None) -> int:
        nonlocal num_sources
        if term is None or term not in last_read:
            return -1
        if not free:
            free.append(num_sources)
            num_sources += 1
        sources[term] = free.pop()
        return sources[term] - first

    def release(terms: Iterable[int], product: int) -> None:
        free.extend(sources[x] for x in terms if x >= first and last_read[x] == product)

    width = Column.ADDENDS + max(len(addends) for addends, _ in structure)
    plan = np.empty((len(structure), width), np.int32)
    for product, (factor, addends, result, residual) in enumerate(products):
        read = [sources[x] for x in (factor, *addends)]
        release({*addends} - {factor}, product)
        row = (read[0], place(result), place(residual), len(addends), *read[1:])
        plan[product] = row[0]
        plan[product, : len(row)] = row
        release([factor], product)
    return plan, max(num_sources - first, 1)


def pick(
    values: Sequence[jax.typing.ArrayLike],
    index: jax.Array | int,
    otherwise: jax.typing.ArrayLike,
) -> jax.Array:
    """Returns the value of that index, where there is one."""
    found = jnp.asarray(otherwise)
    for i, value in enumerate(values):
        found = jnp.where(index == i, value, found)
    return found
