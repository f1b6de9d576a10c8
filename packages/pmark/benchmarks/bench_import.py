"""Time that `import pmark` takes, as a ratio to that of `import torch` alone, in fresh processes taking turns.

Example:
    python benchmarks/bench_import.py --json import.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

BASE = "import torch"
CASE = "import torch, pmark"


def seconds(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def measure(repeats):
    for code in (BASE, CASE):  # not counted: fills the caches
        seconds(code)
    turns = [(seconds(BASE), seconds(CASE)) for _ in range(repeats)]
    base, case = (statistics.median(times) for times in zip(*turns, strict=True))
    return {"torch_s": base, "package_s": case, "ratio": case / base, "repeats": repeats}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns; the medians are compared (5)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; it must be at least 1")
    found = measure(options.repeats)
    print(f"{CASE:30}  {found['package_s']:6.2f} s\n{BASE:30}  {found['torch_s']:6.2f} s\nratio {found['ratio']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
