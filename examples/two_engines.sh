#!/usr/bin/env bash
# Two engines of one model on one host: what one has computed the other does not compute again.
source "$(dirname "$0")/common.sh"

question=${1:-What is the warehouse called?}

start_daemon
start_engine "$PORT"
start_engine "$((PORT + 1))"

say "the first engine computes"
python3 "$here/ask.py" "http://127.0.0.1:$PORT" "$DOCUMENT" "$question"
stored
say "the second engine loads"
python3 "$here/ask.py" "http://127.0.0.1:$((PORT + 1))" "$DOCUMENT" "$question"

say "one namespace, two sessions"
kvhostctl namespaces
kvhostctl sessions
