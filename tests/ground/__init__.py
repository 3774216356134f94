"""What all packages stand on: errors, numbers, files, logs, and what systems differ in."""
