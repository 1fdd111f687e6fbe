"""The data that crosses a border between packages. Imports neither torch nor any other package of ours."""
