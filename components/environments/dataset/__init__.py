"""Tables of prompts, images and answers, from files, folders, Hugging Face or a URL: an environment without code."""
