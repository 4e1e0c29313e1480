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


def with_bar[Measurement](
    measurements: Iterator[Measurement], done: int, least: int
) -> Iterator[Measurement]:
    """Yields measurements whose number is not known before, with a bar like `measure_each`.

    Args:
        measurements: measured when they are taken.
        done: how many were there before.
        least: how many there will be at least.
    """
    from tqdm import tqdm

    with tqdm(total=least, initial=done, leave=False, disable=None) as bar:
        for measurement in measurements:
            bar.update()
            bar.clear()
            yield measurement
            bar.refresh()
