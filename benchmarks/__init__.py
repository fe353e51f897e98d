"""What is measured: each benchmark says what it compares with what, and how to run it."""
