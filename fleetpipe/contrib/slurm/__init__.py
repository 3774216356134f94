"""Makes the tasks that Slurm's ``srun`` started the ranks of a job."""
