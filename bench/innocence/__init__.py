"""What bench/innocent.py is made of: runs, the processes they are made in, what is judged of them, and the report."""
