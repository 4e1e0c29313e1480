"""Times `syrk`, `newton_schulz` and `muon` beside others, and fails where a result is wrong.

    python -m benchmarks newton_schulz --quick
    python -m benchmarks syrk --json syrk.json
    python -m benchmarks newton_schulz --shapes peers 24x512x2048
    python -m benchmarks muon --models gpt2-small
    python -m benchmarks sharded --mesh fsdp=2 fsdp=2,tensor=2 --json sharded.json
    python -m benchmarks start --models gpt2-small --json start.json
    python -m benchmarks accuracy --names standard --json accuracy.json
    python -m benchmarks adversary --names balanced --sizes 16 64
    python -m benchmarks training --json training.json
    python -m benchmarks from_adamw --json from_adamw.json
    python -m benchmarks corpus linux-source-6.1.tar.xz --output linux.tokens.xz
    python -m benchmarks coefficients --names balanced
    python -m benchmarks tpu --topologies v5e:2x2 --json tpu.json
    python -m benchmarks report syrk.json --png syrk.png
    python -m benchmarks report --figures benchmarks/results

Times on a GPU are those that the kernels spend on the device. For rivals in torch they are those
between CUDA events, with the gaps between kernels. The JSON has the wall clock of all, too.
`sharded` runs on several devices, by the wall clock. On a CPU all times are of the wall
clock, and the kernels do not run.

`--quick` measures few cases in few rounds. The heading and the JSON say so: that is no record.
Progress is a bar on stderr. Figures and progress need `pip install --group benchmarks`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._accuracy.command import (
    QUICK_ACCURACY,
    add_accuracy_arguments,
    run_accuracy,
)
from benchmarks._adversary.command import (
    QUICK_ADVERSARY,
    add_adversary_arguments,
    run_adversary,
)
from benchmarks._coefficients.command import add_coefficients_arguments, run_coefficients
from benchmarks._command_line.arguments import add_quick
from benchmarks._records.command import add_report_arguments, run_report
from benchmarks._start.command import QUICK_START, add_start_arguments, run_start
from benchmarks._times import commands as times
from benchmarks._tpu.command import QUICK_TPU, add_tpu_arguments, run_tpu
from benchmarks._training.command import (
    QUICK_TRAINING,
    add_training_arguments,
    run_training,
)
from benchmarks._training.corpus_command import add_corpus_arguments, run_corpus
from benchmarks._training.from_adamw_command import (
    QUICK_FROM_ADAMW,
    add_from_adamw_arguments,
    run_from_adamw,
)

# Packages of the extra "benchmarks". Commands import them where they need them.
_EXTRA = ("matplotlib", "scipy", "sklearn", "tokenizers", "tqdm")


class Command(NamedTuple):
    """A command.

    Attributes:
        help: what it is for.
        add_arguments: adds its flags to a parser.
        run: runs it.
        quick: the defaults of its arguments under `--quick`; pass None for no such flag.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    quick: Mapping[str, Any] | None = None


COMMANDS = {
    "syrk": Command(
        "times of the symmetric product",
        times.add_syrk_arguments,
        times.run_syrk,
        times.QUICK_PRODUCTS,
    ),
    "newton_schulz": Command(
        "times of the iteration",
        times.add_newton_schulz_arguments,
        times.run_newton_schulz,
        times.QUICK_ITERATIONS,
    ),
    "muon": Command(
        "times of whole steps on one device",
        times.add_muon_arguments,
        times.run_muon,
        times.QUICK_UPDATES,
    ),
    "sharded": Command(
        "times of whole steps on several devices",
        times.add_sharded_arguments,
        times.run_sharded,
        times.QUICK_UPDATES,
    ),
    "start": Command(
        "seconds until the first update is compiled, in fresh processes",
        add_start_arguments,
        run_start,
        QUICK_START,
    ),
    "accuracy": Command(
        "distance to the polar factor and FLOPs, by coefficients",
        add_accuracy_arguments,
        run_accuracy,
        QUICK_ACCURACY,
    ),
    "adversary": Command(
        "a search for matrices whose results have too large singular values",
        add_adversary_arguments,
        run_adversary,
        QUICK_ADVERSARY,
    ),
    "training": Command(
        "validation losses of a small GPT, by coefficients, learning rate and seed",
        add_training_arguments,
        run_training,
        QUICK_TRAINING,
    ),
    "from_adamw": Command(
        "held-out losses of AdamW and of the lines that an AdamW user could write, on a CPU",
        add_from_adamw_arguments,
        run_from_adamw,
        QUICK_FROM_ADAMW,
    ),
    "corpus": Command(
        "write the tokens of a text to train on, the sources of Linux",
        add_corpus_arguments,
        run_corpus,
    ),
    "coefficients": Command(
        "recompute our coefficients and the minimax ones",
        add_coefficients_arguments,
        run_coefficients,
    ),
    "tpu": Command(
        "FLOPs, exchanges and memory of programs compiled for TPUs that are not there",
        add_tpu_arguments,
        run_tpu,
        QUICK_TPU,
    ),
    "report": Command(
        "print and plot files of measurements",
        add_report_arguments,
        run_report,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    """Runs the command line: `words`, or the process's own arguments for None.

    Raises:
        SystemExit: words, files or packages do not do; it says what is wrong.
    """
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command_parser = parsers.add_parser(name, help=command.help)
        command.add_arguments(command_parser)
        if command.quick is not None:
            add_quick(command_parser)
    arguments = parser.parse_args(words)
    chosen = COMMANDS[arguments.command]
    if chosen.quick is not None and arguments.quick:
        parsers.choices[arguments.command].set_defaults(**chosen.quick)
        arguments = parser.parse_args(words)
    try:
        chosen.run(arguments)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(f"{error.name} is not installed: pip install --group benchmarks")
    except OSError as error:
        if error.filename is None or Path(error.filename) not in map(Path, words):
            raise
        sys.exit(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
