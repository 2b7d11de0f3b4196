"""The trial of the sensors: trainings, drawn faults, what each sensor says of them, tables and a figure."""
