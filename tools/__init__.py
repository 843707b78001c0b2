"""What makes man/gpushare.1 and completions/ from the command tree; not part of the package."""
