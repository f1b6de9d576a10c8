"""The command line keeps to what all our command lines keep to."""

import pmark
from separata_testing.suites import CommandLine


class TestCommandLine(CommandLine):
    package = pmark
    extra_imports = ("typer",)
    help_for = ((), ("detect",))

    def failing(self, folder):
        return [["detect", str(folder / "missing.jsonl"), "--key", str(folder / "missing.json")]]

    def json_commands(self, folder):
        return [["keygen", "--out", str(folder / "key.json"), "--json"]]
