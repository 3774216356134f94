"""What kills a rank."""
