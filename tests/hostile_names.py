"""Names of folders and files that a program may take for a pattern, an address, an option or a variable."""

from __future__ import annotations

HOSTILE_NAMES = (
    *("2024 [v2]", "[v]", "[!a]", "*", "**", "what?", "50% done", "%41", "100%25", "%d"),
    *("#1", "a&b", "a+b", "reward=1", "step=7", "a:b", "file:", "a::b", "a;b", "a@b"),
    *("!a", "$HOME", "${x}", "{a}", "'", '"', "~", "a\\b", " a ", "new\nline"),
    *("\u00e9", "e\u0301", "-d", "a,b", "a|b", "<b>", "`id`", ".hidden"),
)

EVERY_CHARACTER = "-a [v2] ** what? 50% %41 #1 &+=:;@!$x'\"~ {b} ,\u00e9e\u0301\\n `id` <q> | a::b\nfile:"
"""One name with the special characters of all `HOSTILE_NAMES`, for tests that take seconds for each name."""
