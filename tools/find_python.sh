#!/bin/sh
# Print the path of a Python >= 3.12 that can make a venv, or explain what to install.
for candidate in "$PYTHON" python3.13 python3.12 python3.14 python3 python \
    "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python3 /usr/local/bin/python3.1[2-9] /opt/homebrew/bin/python3.1[2-9]; do
  [ -n "$candidate" ] || continue
  path=$(command -v "$candidate" 2>/dev/null) || continue
  if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    printf '%s\n' "$path"
    exit 0
  fi
done
echo "No Python >= 3.12 with venv found. Install one (e.g. python3.12 and python3.12-venv), or run: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
