"""What makes man/ and completions/ from the command tree; not part of the package."""
