"""A Llama of Hugging Face in PaddleNLP's pipeline, and back."""
