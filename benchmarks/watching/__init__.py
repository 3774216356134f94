"""What watching a job costs, and which slow ranks it names: both are measured on real jobs."""
