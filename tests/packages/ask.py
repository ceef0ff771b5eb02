"""One HTTP call from inside a root, with the standard library: METHOD URL BODY HEADERS, the last two as JSON."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

method, url, body, headers = sys.argv[1:]
data = None if body == "null" else body.encode()
request = urllib.request.Request(url, data, {"content-type": "application/json", **json.loads(headers)}, method=method)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        status, text = answer.status, answer.read()
except urllib.error.HTTPError as err:
    status, text = err.code, err.read()
except OSError as err:
    status, text = 0, json.dumps(str(err)).encode()
try:
    told = json.loads(text)
except ValueError:
    told = text.decode("utf-8", "replace")
print(json.dumps({"status": status, "body": told}))
