"""What is seen where two runs compute in different precisions, or in a coarse one."""
