#!/usr/bin/env bash
# Builds .venv from requirements.lock and fetches the pinned Delta jars. A stamp holds the digest of what was
# installed, so a second call is done in a blink and a changed lock file is installed anew.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { printf 'set-up: %s\n' "$@" >&2; exit 2; }

stamp=.venv/.installed
want=$(cat requirements.lock infra/setup/bootstrap.lock infra/jars.lock pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then exit 0; fi

python=${PYTHON:-}
for candidate in ${python:-python3.12 python3.11 python3.13 python3}; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    python=$candidate; break
  fi
  python=
done
[ -n "$python" ] || fail "expected Python 3.11, 3.12 or 3.13 as python3" \
  "found $(python3 --version 2>&1 || echo none)" "next: install one (apt install python3 python3-venv), or PYTHON=/path/to/python make setup"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module" "next: apt install python3-venv"
if ! java=$(java -version 2>&1); then java="none"; fi
major=$(printf '%s' "$java" | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
[ -n "$major" ] && [ "$major" -ge 17 ] || fail "expected Java 17 or newer, which Spark runs on" "found ${java%%$'\n'*}" \
  "next: apt install openjdk-17-jre-headless (or set JAVA_HOME and PATH to a JDK 17+)"

step() { printf '[set-up %s] %s\n' "$1" "$2"; }
started=$(date +%s)
step 1/4 "environment .venv with $("$python" --version)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r infra/setup/bootstrap.lock
step 2/4 "$(grep -c '^[a-z].*==' requirements.lock) pinned packages, 6 GB unpacked; one to six minutes"
# Compiled once here: otherwise each rank process of a read-only or shared environment compiles for itself.
.venv/bin/uv pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e .
step 3/4 "Delta jars"
.venv/bin/python -m infra.spark fetch-jars jars
step 4/4 "done in $(( $(date +%s) - started )) s"
printf '%s\n' "$want" > "$stamp"
