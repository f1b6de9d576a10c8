import bodes_steer
from separata_testing.suites import CommandLine


class TestCommandLine(CommandLine):
    package = bodes_steer
    help_for = ((), ("fit",), ("eval", "generation"))

    def failing(self, folder):
        return [["extract", "--data", str(folder / "missing.jsonl"), "--out", str(folder / "a.safetensors")]]
