"""Runs the benchmarks, all or by name, one after another on an idle machine.

    python -m benchmarks [NAME ...] [--quick] [--data=FILE]

Each is a script of its own, run in a process of its own; its figures and JSON go to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = (
    "step_cost",
    "calls",
    "batches",
    "time_to_accuracy",
    "inner_steps",
    "compile_time",
    "gpu_check",
    "rivals",
    "head_scaling",
    "memory",
    "profile_step",
    "numerics",
    "windows",
)


def title(name: str) -> str:
    """The first line of a script's docstring."""
    docstring = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text()))
    assert docstring is not None
    return docstring.splitlines()[0]


def main() -> int:
    """Runs what was asked for; returns how many of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__.splitlines()[0],
        epilog="benchmarks:\n" + "\n".join(f"  {name:18s}{title(name)}" for name in NAMES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="see below; all if none is given")
    parser.add_argument("--quick", action="store_true", help="everything tiny: is it sound?")
    parser.add_argument("--data", type=Path, help="air quality as published, for windows")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, in rivals")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    options = ["--quick"] if args.quick else []
    failed = []
    for name in args.names or NAMES:
        print(f"\n{name}: {title(name)}", flush=True)
        more = [f"--data={args.data}"] if args.data and name == "windows" else []
        more += ["--compile"] if args.compile and name == "rivals" else []
        command = [sys.executable, str(HERE / f"{name}.py"), *options, *more]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
