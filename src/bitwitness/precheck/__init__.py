"""What a pre-check leaves: tables, JUnit XML, a summary for the terminal, and files that run a failing case alone."""
