"""A job whose ranks Slurm's ``srun`` has started."""
