"""The environment `dataset`: tables of prompts, images and answers from files, folders, Hugging Face or a URL."""
