"""A conversation of several turns about a document; each turn sends everything that was said before.

    python chat.py http://127.0.0.1:8000 document.md conversation.json "First question" "Second question"

The conversation is kept in the file, so that another call goes on with it. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ask import ask, show


def main() -> int:
    if len(sys.argv) < 5:
        print(__doc__, file=sys.stderr)
        return 2
    _, server, document, kept, *questions = sys.argv
    file = Path(kept)
    messages = json.loads(file.read_text()) if file.exists() else []
    for question in questions:
        print(f"\n   > {question}")
        text = question if messages else f"{Path(document).read_text()}\n\n{question}"
        messages.append({"role": "user", "content": text})
        result = ask(server, messages)
        messages.append({"role": "assistant", "content": result["answer"]})
        show(result)
        print(json.dumps(result))
        file.write_text(json.dumps(messages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
