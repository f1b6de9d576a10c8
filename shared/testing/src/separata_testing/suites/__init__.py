"""Conformance suites: base classes whose tests a package inherits by filling in a few hooks.

A suite is used so, in a test module:

    class TestUnchanged(ModelUnchangedAfterExit):
        def context(self, model):
            return my_package.edit(model, strength=2.0)

Every hook is documented in its class. None of them imports torch before a test runs.
"""

from separata_testing.suites.batch import BatchConsistency
from separata_testing.suites.command_line import CommandLine
from separata_testing.suites.files import FileFormat
from separata_testing.suites.model import ModelUnchangedAfterExit
from separata_testing.suites.resume import Resumable

__all__ = ["BatchConsistency", "CommandLine", "FileFormat", "ModelUnchangedAfterExit", "Resumable"]
