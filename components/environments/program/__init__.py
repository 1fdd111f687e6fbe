"""The environment `program`: an agent program of the user, which asks our policy through OpenAI's API.

Each rollout starts the program anew, with a task, a URL and a key. Its answer is graded by the rewards of the recipe.
"""
