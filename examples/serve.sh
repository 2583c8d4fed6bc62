#!/usr/bin/env bash
# One engine with a cache, and curl: the same question twice.
source "$(dirname "$0")/common.sh"

start_daemon
start_engine "$PORT"

for turn in first second; do
    say "$turn time"
    curl --noproxy '*' -s "http://127.0.0.1:$PORT/v1/completions" -H 'Content-Type: application/json' -d @- <<JSON
{"model": "example", "prompt": "$(tr -d '"\\\n' <"$DOCUMENT" | cut -c 1-4000)", "max_tokens": 16, "temperature": 0}
JSON
    echo
done

say "what the cache has"
stored
kvhostctl status
