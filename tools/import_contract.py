"""Hold the arrows of the design against every import in the workspace.

Packages do not import each other; core and kit import nothing of ours, the rest of shared/ no package; embedded is
imported by demos alone (tests and benchmarks are in no distribution, and may); and nothing heavy is imported by
whatever `import <package>` executes.

Example:
    python tools/import_contract.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from workspace import Member, Workspace, WorkspaceError, fail

HEAVY = ("transformers", "vllm", "trl", "peft", "pandas", "matplotlib", "scipy", "triton", "httpx", "openai")


def contracts(members: Collection[Member]) -> dict[str, Any]:
    """Returns import-linter's settings for these members."""
    packages = [m.module for m in members if m.is_package]
    shared = [m.module for m in members if not m.is_package]
    found: list[dict[str, Any]] = []

    def forbid(name: str, sources: list[str], targets: list[str], ignore: list[str] | None = None) -> None:
        if sources and targets:
            found.append(
                {
                    "id": name.replace(" ", "-"),
                    "name": name,
                    "type": "forbidden",
                    "source_modules": sources,
                    "forbidden_modules": targets,
                    "ignore_imports": ignore or [],
                    "unmatched_ignore_imports_alerting": "none",
                }
            )

    if len(packages) > 1:
        found.append(
            {
                "id": "independence",
                "name": "packages do not import each other",
                "type": "independence",
                "modules": packages,
            }
        )
    forbid("shared imports no package", shared, packages)
    for name in ("core", "kit"):
        own = f"separata_{name}"
        if own in shared:
            forbid(f"{name} imports nothing of ours", [own], [m for m in shared if m != own])
    if "separata_embedded" in shared:
        others = [m for m in [*packages, *shared] if m not in ("separata_embedded", "separata_testing")]
        demos = [
            f"{m}.{demo} -> separata_embedded{rest}"
            for m in packages
            for demo in ("demo", "demo.**")
            for rest in ("", ".**")
        ]
        forbid("embedded is for demos alone", others, ["separata_embedded"], demos)
    if "separata_testing" in shared:
        others = [m for m in [*packages, *shared] if m != "separata_testing"]
        forbid("testing is in no distribution", others, ["separata_testing"])
    return {"root_packages": [*packages, *shared], "contracts": found}


def as_toml(settings: dict[str, Any]) -> str:
    """Writes import-linter's settings as TOML; JSON strings and arrays are TOML too."""
    lines = ["[tool.importlinter]", f"root_packages = {json.dumps(settings['root_packages'])}"]
    for contract in settings["contracts"]:
        lines += [
            "",
            "[[tool.importlinter.contracts]]",
            *(f"{key} = {json.dumps(value)}" for key, value in contract.items()),
        ]
    return "\n".join(lines) + "\n"


def heavy_imports(members: Collection[Member], heavy: Collection[str] = HEAVY) -> list[str]:
    """Returns one line for each heavy library that `import <package>` would execute, in any module on the way."""
    imports = {name: found for member in members for name, found in member.imports().items()}
    files = {name: file for member in members for name, file in member.modules().items()}
    findings = set()
    for member in members:
        seen: set[str] = set()
        queue = [member.module]
        while queue:
            module = queue.pop()
            if module in seen or module not in imports:
                continue
            seen.add(module)
            queue.append(module.rpartition(".")[0])
            for found in imports[module]:
                if found.nested or found.typing_only:
                    continue
                if found.top in heavy:
                    where = f"{files[module]}:{found.line}"
                    findings.add(
                        f"{where}: `import {member.module}` executes `import {found.top}`; import it where it is used"
                    )
                queue += [found.module, f"{found.module}.{found.name}"]
    return sorted(findings)


def main() -> int:
    """Checks every member; prints one line for each broken contract."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=form).parse_args()
    try:
        workspace = Workspace.load()
        findings = heavy_imports(workspace.members)
    except WorkspaceError as error:
        return fail(str(error), 2)
    for finding in findings:
        print(finding)
    config = workspace.root / ".build" / "import-linter.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(as_toml(contracts(workspace.members)))
    linter = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo", str(config)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(m.source.parent) for m in workspace.members)},
        check=False,
    )
    return 1 if findings or linter.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
