#!/usr/bin/env bash
# An engine answers, ends, and starts again: the second time the prompt comes from the cache.
source "$(dirname "$0")/common.sh"

question=${1:-What is the warehouse called?}

start_daemon
start_engine "$PORT"
say "$question"
python3 "$here/ask.py" "http://127.0.0.1:$PORT" "$DOCUMENT" "$question"
stored
end_engine "$engine"

start_engine "$PORT"
say "$question"
python3 "$here/ask.py" "http://127.0.0.1:$PORT" "$DOCUMENT" "$question"
