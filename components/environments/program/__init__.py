"""The environment `program`: an agent program of the user, which asks our policy through OpenAI's API.

Each rollout starts a process of the program, with a task, a URL and a key. Its answer is graded by the rewards of the
recipe.
"""
