"""Downloading the source distribution with the package index client that is at hand."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from separata_embedded.archive import ARCHIVE, FILE_NAME, SDIST
from separata_embedded.errors import FetchError, IntegrityError

# `pip download` asks the build backend of a source distribution for its metadata, which would run its setup.py. This
# module stands before the real setuptools on the module path of that one command and answers from constants.
_BACKEND = """
import os


class _Backend:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        folder = "vaderSentiment-0.5.dist-info"
        os.makedirs(os.path.join(metadata_directory, folder))
        with open(os.path.join(metadata_directory, folder, "METADATA"), "w") as file:
            file.write("Metadata-Version: 2.1\\nName: vaderSentiment\\nVersion: 0.5\\n")
        return folder


__legacy__ = _Backend()
"""


def fetch_sdist(timeout: float) -> bytes:
    """Download `vaderSentiment-0.5.zip` and return its content.

    Args:
        timeout: Seconds that the client may take.

    Returns:
        The bytes. pip has compared their hash before it opened them; the caller compares it again.

    Raises:
        FetchError: No client is at hand, or it failed or took too long.
        IntegrityError: The index delivered a file of another hash.
    """
    client, environment = _client(os.environ)
    with tempfile.TemporaryDirectory(prefix="separata-") as name:
        folder = Path(name)
        backend = folder / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{SDIST} --hash=sha256:{ARCHIVE.sha256}\n")
        arguments = [
            *("download", "--no-input", "--disable-pip-version-check", "--retries", "1"),
            *("--timeout", str(max(1, min(15, int(timeout))))),
            *("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--use-pep517"),
            *("--require-hashes", "--requirement", str(requirements), "--dest", str(folder)),
        ]
        module_path = [str(backend.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, module_path))
        code, output = _run([*client, *arguments], environment, timeout, folder)
        archive = folder / FILE_NAME
        if code == 0 and archive.is_file():
            return archive.read_bytes()
    if "DO NOT MATCH THE HASHES" in output:
        raise IntegrityError(
            f"The package index delivered another file for {SDIST} than the one with SHA-256 {ARCHIVE.sha256}. Ask "
            f"whoever runs the index, or work offline: rated_texts(offline=True). pip said:\n{output[-2000:]}"
        )
    raise FetchError(f"{' '.join(client)} download ended with exit code {code}: {_last_lines(output)}")


def _client(environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command that is pip, and the environment to run it in."""
    environment = dict(environ)
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"], environment
    if uv := _find_uv(environ):
        # This pip does not read uv's settings, so the index goes along in pip's own variables.
        for ours, theirs in (
            ("PIP_INDEX_URL", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
            ("PIP_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
        ):
            given = next((environ[key] for key in theirs if environ.get(key)), None)
            if given and not environ.get(ours):
                environment[ours] = " ".join(re.sub(r"^[\w.-]+=", "", url) for url in given.split())
        return [uv, "tool", "run", "pip"], environment
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip], environment
    raise FetchError("neither pip nor uv is at hand; install one of them, e.g. `python -m ensurepip`")


def _find_uv(environ: Mapping[str, str]) -> str | None:
    candidates = (environ.get("UV"), shutil.which("uv"), str(Path(sys.executable).with_name("uv")))
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def _run(command: list[str], environment: dict[str, str], timeout: float, folder: Path) -> tuple[int, str]:
    """Run a command and end it together with its children when time is up."""
    with subprocess.Popen(  # noqa: S603 - the command is one of three constants, without a shell
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise FetchError(f"{' '.join(command[:4])} took more than {timeout:g} seconds") from error
            raise
    return process.returncode, output


def _last_lines(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " / ".join((errors or lines)[-2:])
