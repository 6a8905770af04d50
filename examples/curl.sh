#!/usr/bin/env bash
# Ask a running server, streamed: examples/curl.sh [QUESTION] [URL]. With a key: CARREL_API_KEY=... examples/curl.sh
set -euo pipefail

# a document, a blank line and a question, as carrel-nano was trained on
default="It rained all morning. The secret number of the amber fox is 48213. In the evening the boats came home.

What is the secret number of the amber fox?"
question="${1:-$default}"
url="${2:-http://127.0.0.1:8000}"
key=(${CARREL_API_KEY:+-H "Authorization: Bearer $CARREL_API_KEY"})

body="$(python3 -c '
import json, sys
print(json.dumps({
    "model": sys.argv[1],
    "messages": [{"role": "user", "content": sys.argv[2]}],
    "max_tokens": 128,
    "stream": True,
    "stream_options": {"include_usage": True},
    "carrel": {"policy": "bitkeys", "budget": 0.1},
}))' "${MODEL:-carrel-nano}" "$question")"

curl --fail-with-body --no-buffer -sS "$url/v1/chat/completions" \
  -H 'Content-Type: application/json' "${key[@]}" -d "$body"
