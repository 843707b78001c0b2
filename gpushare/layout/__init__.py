"""A host as other engines write it: pure, from a description of the host to documents."""

from __future__ import annotations
