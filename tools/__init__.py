"""What makes man/ and the completions from the command tree; not part of the package."""
