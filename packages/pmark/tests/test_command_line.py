"""The command line keeps to what all our command lines keep to."""

import pmark
from separata_testing.suites import CommandLine


class TestCommandLine(CommandLine):
    package = pmark
    extra_imports = ("typer",)
    help_for = ((), ("about",))

    def succeeding(self, folder):
        return [["about"]]

    def wrong_usage(self, folder):
        return [["about", "too", "much"]]

    def json_commands(self, folder):
        return [["about", "--json"]]
