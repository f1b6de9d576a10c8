"""Fixtures and conformance tests that every package of this repository inherits. Never published."""
