"""What saving costs a training, and what a killed rank costs a job."""
