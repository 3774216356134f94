"""Where a capture may be cut, where a user or the costs of its nodes say, and what crosses."""
