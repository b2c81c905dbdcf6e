"""Programs that make parts of the project; none is installed with the package."""
