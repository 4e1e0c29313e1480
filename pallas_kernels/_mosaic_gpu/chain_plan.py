"""The plan of a chain of symmetric products: what each reads and where it goes, as data."""

import numpy as np

# For each product the sources of its addends, and whether its residual is a source. Sources number
# the inputs, then the results and residuals in the order in which they are made.
type Structure = tuple[tuple[tuple[int, ...], bool], ...]

# The columns of a product's row in a plan. They hold the source of the factor, the places of the
# result and of its residual, the number of addends, and their sources. A place of -1 says that no
# product reads the term. After the sources of all addends stands the factor's.
FACTOR, RESULT, RESIDUAL, COUNT, ADDENDS = range(5)


def plan_chain(
    structure: Structure, num_inputs: int, *, all_in_places: bool = False
) -> tuple[np.ndarray, int]:
    """Returns a plan, and how many places its terms have.

    A result takes the place of a term that is not read any more. That can be one of its own
    addends, because each tile reads its addends before it is stored. It cannot be its factor.

    Args:
        structure: of the chain.
        num_inputs: how many inputs there are.
        all_in_places: whether the inputs and the last result have places, too. Input i has place i
            at first, and a source is a place. Otherwise a source is the number of an input, or the
            number of inputs plus a place.
    """
    made, factor = num_inputs, 0  # the numbers of the next result and of the next factor
    products = []
    last_read: dict[int, int] = {}
    for product, (addends, residual) in enumerate(structure):
        last_read |= dict.fromkeys((factor, *addends), product)
        products.append((factor, addends, made, made + 1 if residual else None))
        factor, made = made, made + 1 + residual
    places: dict[int, int] = {}
    if all_in_places:
        places = {i: i for i in range(num_inputs)}
        last_read[factor] = len(structure)
    free: list[int] = []
    num_places = len(places)

    def place(term: int | None) -> int:
        nonlocal num_places
        if term is None or term not in last_read:
            return -1
        if not free:
            free.append(num_places)
            num_places += 1
        places[term] = free.pop()
        return places[term]

    def source(term: int) -> int:
        if all_in_places:
            return places[term]
        return term if term < num_inputs else num_inputs + places[term]

    width = ADDENDS + max(len(addends) for addends, _ in structure)
    plan = np.empty((len(structure), width), np.int32)
    for product, (factor, addends, result, residual) in enumerate(products):
        sources = [source(factor), *map(source, addends)]
        free += [
            places[c] for c in {*addends} - {factor} if c in places and last_read[c] == product
        ]
        row = (sources[0], place(result), place(residual), len(addends), *sources[1:])
        plan[product] = row[0]
        plan[product, : len(row)] = row
        if factor in places and last_read[factor] == product:
            free.append(places[factor])
    return plan, max(num_places, 1)
