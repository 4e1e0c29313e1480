"""A bar on stderr that says which case is measured; needs tqdm."""

from collections.abc import Callable, Iterable, Iterator


def measure_each[Case, Measurement](
    cases: Iterable[Case],
    measure: Callable[[Case], Measurement],
    label: Callable[[Case], str] = str,
) -> Iterator[Measurement]:
    """Yields the measurement of each case, with a bar where stderr is a terminal.

    The bar is away while the caller has a measurement, which it may print.

    Args:
        cases: what is measured, in this order.
        measure: returns the measurement of a case.
        label: returns what the bar calls a case.
    """
    from tqdm import tqdm

    cases = [*cases]
    with tqdm(total=len(cases), leave=False, disable=None) as bar:
        for case in cases:
            bar.set_description(label(case))
            measurement = measure(case)
            bar.update()
            bar.clear()
            yield measurement
