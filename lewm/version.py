"""The one place where the version is written; the package's metadata read it from here."""

__version__ = "0.2.0"
