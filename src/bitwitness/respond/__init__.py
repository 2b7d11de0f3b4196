"""What follows: reports, alerts, healing, stopping."""
